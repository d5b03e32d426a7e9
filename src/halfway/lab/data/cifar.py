"""CIFAR-10 and CIFAR-100 from either release, each file verified by its checksum."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from .base import Colours
from .settings import DataSettings
from .sources import Arrays, DatasetSources, missing

COLOURS_10 = Colours((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
COLOURS_100 = Colours((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
PIXELS = 3 * 32 * 32

# The folder of each release, and a file that only it has.
PYTHON_10, BINARY_10 = ("cifar-10-batches-py", "data_batch_1"), ("cifar-10-batches-bin", "data_batch_1.bin")
PYTHON_100, BINARY_100 = ("cifar-100-python", "train"), ("cifar-100-binary", "train.bin")

# SHA-1 of the files of the binary releases.
SUMS_10 = {
    "data_batch_1.bin": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "data_batch_2.bin": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "data_batch_3.bin": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "data_batch_4.bin": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "data_batch_5.bin": "26e2849e66a845b7f1e4614ae70f4889ae604628",
    "test_batch.bin": "67eb016db431130d61cd03c7ad570b013799c88c",
}
SUMS_100 = {
    "train.bin": "e207cd2e05b73b1393c74c7f5e7bea451d63e08e",
    "test.bin": "8fb6623e830365ff53cf14adec797474f5478006",
}

NAMES_10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
# A list would take a hundred lines.
NAMES_100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm""".split()  # noqa: SIM905


def cifar10(settings: DataSettings, root: Path) -> DatasetSources:
    """Python or binary release."""
    if folder := _folder(root, *PYTHON_10):
        return _python_release("CIFAR10", "CIFAR-10", folder, NAMES_10)
    folder = _folder(root, *BINARY_10)
    if folder is None:
        raise missing(
            f"{PYTHON_10[0]}/ or {BINARY_10[0]}/",
            root,
            f"`halfway data cifar10 --to {root}` downloads it. Or get it from Alex Krizhevsky's page, "
            "https://www.cs.toronto.edu/~kriz/cifar.html: unpack cifar-10-python.tar.gz or cifar-10-binary.tar.gz "
            "there, so that it looks like\n"
            f"    {root}/{BINARY_10[0]}/data_batch_1.bin ... data_batch_5.bin, test_batch.bin",
        )
    files = [checked(folder / name, SUMS_10) for name in SUMS_10]
    train, test = records(b"".join(files[:5]), 1), records(files[5], 1)
    return DatasetSources("CIFAR-10, binary release", NAMES_10, Arrays(*train), Arrays(*test))


def cifar100(settings: DataSettings, root: Path) -> DatasetSources:
    """Python or binary release, with the 100 fine labels."""
    if folder := _folder(root, *PYTHON_100):
        return _python_release("CIFAR100", "CIFAR-100", folder, NAMES_100)
    folder = _folder(root, *BINARY_100)
    if folder is None:
        raise missing(
            f"{PYTHON_100[0]}/ or {BINARY_100[0]}/",
            root,
            f"`halfway data cifar100 --to {root}` downloads it. Or get it from Alex Krizhevsky's page, "
            "https://www.cs.toronto.edu/~kriz/cifar.html: unpack cifar-100-python.tar.gz or cifar-100-binary.tar.gz "
            "there, so that it looks like\n"
            f"    {root}/{BINARY_100[0]}/train.bin, test.bin",
        )
    train, test = (records(checked(folder / name, SUMS_100), 2) for name in SUMS_100)
    return DatasetSources("CIFAR-100, binary release", NAMES_100, Arrays(*train), Arrays(*test))


def folder_10(root: Path) -> Path | None:
    """The folder in `root` that holds CIFAR-10, in either release; None if there is none."""
    return _folder(root, *PYTHON_10) or _folder(root, *BINARY_10)


def folder_100(root: Path) -> Path | None:
    """The folder in `root` that holds CIFAR-100, in either release; None if there is none."""
    return _folder(root, *PYTHON_100) or _folder(root, *BINARY_100)


def _folder(root: Path, name: str, file: str) -> Path | None:
    """The release's folder: in the root, or the root itself, recognised by its name or by a file that only it has."""
    if (root / name).is_dir():
        return root / name
    # A folder "train" could be anything; a file "train" beside a file "test" is CIFAR-100.
    return root if root.is_dir() and (root.resolve().name == name or (root / file).is_file()) else None


def records(data: bytes, labels: int) -> tuple[Tensor, Tensor]:
    """Parse the binary layout: label bytes, the last of which is the finest, then 3 x 32 x 32 bytes.

    Returns:
        Pictures (N, 3, 32, 32) uint8 and labels (N,) int64.
    """
    # A copy, because bytes are read-only and PyTorch warns about that.
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, labels + PIXELS)
    return rows[:, labels:].reshape(-1, 3, 32, 32), rows[:, labels - 1].long()


def checked(path: Path, sums: dict[str, str]) -> bytes:
    """A file's bytes; an error unless they are the official ones."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: unpack the archive again")
    data = path.read_bytes()
    if hashlib.sha1(data).hexdigest() != sums[path.name]:
        raise ValueError(
            f"{path} is not the official file (its SHA-1 is another): delete {path.parent} and unpack again"
        )
    return data


def _python_release(kind: str, title: str, folder: Path, names: list[str]) -> DatasetSources:
    """Read through torchvision, which verifies its own checksums before it unpickles anything."""
    from torchvision import datasets
    from torchvision.datasets.utils import check_integrity

    official = getattr(datasets, kind)
    files = [*official.train_list, *official.test_list, (official.meta["filename"], official.meta["md5"])]
    for name, md5 in files:
        # torchvision would not say which file it is.
        if not check_integrity(str(folder / name), md5):
            raise ValueError(
                f"{folder / name} is missing or not the official file: delete {folder} and unpack {official.filename} "
                "again"
            )
    here = type(kind, (official,), {"base_folder": folder.resolve().name})
    parts = [here(folder.resolve().parent, train=train) for train in (True, False)]
    train, test = (
        Arrays(torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets))
        for part in parts
    )
    return DatasetSources(f"{title}, Python release", names, train, test)
