"""The public data sets that recipes use: where they come from, where they go, on which terms, and fetching them.

Addresses and checksums are torchvision's, so that a new torchvision brings those that have moved.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..files import DiskFullError
from . import cifar, download, fashion, folders, sbd, segmentation
from .settings import DataSettings

# Where archives are downloaded from instead of the official addresses: a folder that holds them under their own names.
MIRROR = "HALFWAY_DATA_URL"


@dataclass(frozen=True)
class Archive:
    """A file to download.

    url: the official address; its last part is the file's name.
    md5: the checksum that the official site publishes.
    """

    url: str
    md5: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Official:
    """A data set that is published somewhere.

    title: for people to read.
    find: the folder in a root that holds it; None if there is none.
    expected: description of the files in the root.
    size: bytes to download.
    page: where it is described.
    terms: licence, or what the page asks for.
    archive: what to download; None where that is left to people, for an account or a package, see `by_hand`.
    install: (unpacked archive, root): puts complete folders in their places.
    wanted: which members of the archive, by name.
    needs: another entry that must be there first.
    by_hand: how to get it where there is no archive; {root} stands for the folder.
    """

    title: str
    find: Callable[[Path], Path | None]
    expected: str
    size: int
    page: str
    terms: str
    archive: Callable[[], Archive] | None = None
    install: Callable[[Path, Path], None] = lambda unpacked, root: None
    wanted: Callable[[str], bool] = lambda name: True
    needs: str | None = None
    by_hand: str = ""


def _cifar(kind: str) -> Callable[[], Archive]:
    def archive() -> Archive:
        from torchvision import datasets

        official = getattr(datasets, kind)
        return Archive(official.url, official.tgz_md5)

    return archive


def _voc() -> Archive:
    from torchvision.datasets.voc import DATASET_YEAR_DICT

    return Archive(DATASET_YEAR_DICT["2012"]["url"], DATASET_YEAR_DICT["2012"]["md5"])


def _sbd() -> Archive:
    from torchvision.datasets import SBDataset

    return Archive(SBDataset.url, SBDataset.md5)


def _folder(name: str) -> Callable[[Path, Path], None]:
    return lambda unpacked, root: download.move(unpacked / name, root / name)


_CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
_CIFAR_TERMS = "no licence on its page, which asks to cite Krizhevsky, Learning Multiple Layers of Features, 2009"

OFFICIAL = {
    "cifar10": Official(
        "CIFAR-10",
        cifar.folder_10,
        "cifar-10-batches-py/ or cifar-10-batches-bin/",
        170_498_071,
        _CIFAR_PAGE,
        _CIFAR_TERMS,
        _cifar("CIFAR10"),
        _folder("cifar-10-batches-py"),
    ),
    "cifar100": Official(
        "CIFAR-100",
        cifar.folder_100,
        "cifar-100-python/ or cifar-100-binary/",
        169_001_437,
        _CIFAR_PAGE,
        _CIFAR_TERMS,
        _cifar("CIFAR100"),
        _folder("cifar-100-python"),
    ),
    "fashion-mnist": Official(
        "Fashion-MNIST",
        fashion.folder,
        "fashion-mnist/ or FashionMNIST/raw/",
        30_878_645,
        "https://github.com/zalandoresearch/fashion-mnist",
        "MIT licence",
        by_hand=fashion.BY_HAND,
    ),
    "voc2012": Official(
        "PASCAL VOC 2012",
        segmentation.voc_folder,
        "VOCdevkit/VOC2012/",
        1_999_639_040,
        "http://host.robots.ox.ac.uk/pascal/VOC/voc2012",
        "images from Flickr, whose terms of use apply",
        _voc,
        _folder("VOCdevkit/VOC2012"),
    ),
    "sbd": Official(
        "masks of the Semantic Boundaries Dataset, for data.split=trainaug of voc2012",
        segmentation.trainaug_folder,
        "VOCdevkit/VOC2012/SegmentationClassAug/ and its list trainaug.txt",
        1_419_539_633,
        "http://home.bharathh.info/pubs/codes/SBD/download.html",
        "no licence on its page, which asks to cite Hariharan et al., Semantic Contours, ICCV 2011",
        _sbd,
        sbd.install,
        sbd.wanted,
        needs="voc2012",
    ),
    "imagenet": Official(
        "ImageNet, ILSVRC 2012",
        folders.class_folders,
        "train/ and val/ with a folder per class",
        147_897_477_120 + 6_744_924_160,
        "https://image-net.org/download.php",
        "research and education only, not commercial; needs an account",
        by_hand="""\
1. Make an account at https://image-net.org/signup.php and ask for access; the terms are shown there.
2. From https://image-net.org/challenges/LSVRC/2012/2012-downloads.php put three files into {root}:
       ILSVRC2012_img_train.tar      147.9 GB
       ILSVRC2012_img_val.tar          6.7 GB
       ILSVRC2012_devkit_t12.tar.gz    2.6 MB
3. Let torchvision check and unpack them, with a folder per class in train/ and val/ (as much space again, and hours):
       python -c "from torchvision.datasets import ImageNet as I; I('{root}', 'train'); I('{root}', 'val')"
""",
    ),
    "cityscapes": Official(
        "Cityscapes, fine annotations",
        segmentation.cityscapes_folder,
        "leftImg8bit/ and gtFine/",
        11_592_327_197 + 252_567_705,
        "https://www.cityscapes-dataset.com",
        "research, teaching and private use, not commercial; needs an account",
        by_hand="""\
1. Make an account at https://www.cityscapes-dataset.com/register; the licence is shown there.
2. Download with the official tool, which asks for the account's name and password (11.8 GB), and unpack:
       pip install cityscapesscripts
       mkdir -p {root}
       csDownload -d {root} gtFine_trainvaltest.zip leftImg8bit_trainvaltest.zip
       python -m zipfile -e {root}/gtFine_trainvaltest.zip {root}
       python -m zipfile -e {root}/leftImg8bit_trainvaltest.zip {root}
""",
    ),
}


def name_for(settings: DataSettings) -> str | None:
    """The entry of `OFFICIAL` that a recipe's data come from; None for a user's own data."""
    if settings.name == "voc2012" and settings.split == "trainaug":
        return "sbd"
    name = {"imagefolder": "imagenet"}.get(settings.name, settings.name)
    return name if name in OFFICIAL else None


def fetch_for(settings: DataSettings, root: str | Path, mirror: str | None = None) -> None:
    """Fetch what a recipe needs, unless it is there."""
    if root == "synthetic":
        raise ValueError("--download and --data synthetic exclude each other: synthetic pictures need no files")
    name = name_for(settings)
    if name is not None:
        fetch(name, root, mirror)


def fetch(name: str, root: str | Path, mirror: str | None = None) -> Path:
    """Fetch a data set into a folder, unless it is there; returns where it is.

    A second process that wants the same data set waits for the first. An archive that is already in the folder is used
    and left there; a downloaded one is deleted once it is unpacked.

    Args:
        name: an entry of `OFFICIAL`.
        root: the folder.
        mirror: address of a folder that holds the official archives; None: the environment variable
            HALFWAY_DATA_URL, or the official addresses.
    """
    if name not in OFFICIAL:
        raise ValueError(f"no data set {name!r}: choose from {', '.join(OFFICIAL)}")
    root, wanted = Path(root).expanduser(), OFFICIAL[name]
    if (found := wanted.find(root)) is not None:
        return found
    if wanted.archive is None:
        steps = wanted.by_hand.format(root=root)
        raise ValueError(f"{wanted.title} is not in {root}, and halfway does not download it. What to do:\n{steps}")
    if wanted.needs is not None:
        fetch(wanted.needs, root, mirror)
    root.mkdir(parents=True, exist_ok=True)
    lock = root / f".{name}.lock"
    waiting = f"another process is downloading {wanted.title} to {root}: waiting for it"
    with download.one_at_a_time(lock, lambda: print(waiting, file=sys.stderr)):
        found = wanted.find(root)
        if found is None:
            _fetch(name, wanted, wanted.archive(), root, mirror or os.environ.get(MIRROR))
            found = wanted.find(root)
        if found is None:
            raise ValueError(f"the archive of {wanted.title} does not contain {wanted.expected}")
        # Other processes will find the data set, whether they wait for this lock or make a new one.
        with contextlib.suppress(OSError):
            lock.unlink()
    return found


def _fetch(name: str, wanted: Official, archive: Archive, root: Path, mirror: str | None) -> None:
    path = root / archive.name
    brought = path.is_file()
    try:
        if brought and download.md5_of(path) != archive.md5:
            raise ValueError(f"{path} is not the official file (its MD5 is another): delete it, then call this again")
        _check_room(wanted, path, root)
        if not brought:
            print(f"{wanted.title}: {archive.name}, {size(wanted.size)}. Terms: {wanted.terms}", file=sys.stderr)
            download.download(_address(archive, mirror), path, archive.md5)
        with download.unpacked(path, root / f".{name}.unpacking", wanted.wanted) as unpacked:
            wanted.install(unpacked, root)
    except DiskFullError as error:
        raise ValueError(f"{error}, then the same command goes on where it stopped") from error
    except KeyboardInterrupt:
        print("\nwhat has been downloaded is kept; the same command goes on from there", file=sys.stderr)
        raise
    if not brought:
        path.unlink()


def _address(archive: Archive, mirror: str | None) -> str:
    if mirror is None:
        return archive.url
    return mirror if mirror.endswith(f"/{archive.name}") else f"{mirror.rstrip('/')}/{archive.name}"


def _check_room(wanted: Official, path: Path, root: Path) -> None:
    """Raise if there is no room for the archive and its contents, assumed to be as large."""
    here = sum(p.stat().st_size for p in (path, download.part_of(path)) if p.exists())
    needed, free = max(0, 2 * wanted.size - here), shutil.disk_usage(root).free
    if free < needed:
        raise ValueError(
            f"{wanted.title} needs about {size(needed)} in {root} (the archive and what is in it), but {size(free)} "
            "are free: free some space, or choose a folder on another disk"
        )


def size(count: int) -> str:
    """Bytes, for people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
