"""Fashion-MNIST: 70,000 grey pictures of 28 x 28 px, from its official idx files, packed or unpacked."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import torch
from torch import Tensor

from .base import Colours
from .settings import DataSettings
from .sources import Arrays, DatasetSources, missing

NAMES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
COLOURS = Colours((0.2860, 0.2860, 0.2860), (0.3530, 0.3530, 0.3530))
SIDE = 28
# Of the unpacked files: distributions pack them anew.
SUMS = {
    "train-images-idx3-ubyte": "b9bd999c0106c9b8b4b0cefce58c9a6060f27095",
    "train-labels-idx1-ubyte": "4bccf37222e01638381eaa326bf730337a597267",
    "t10k-images-idx3-ubyte": "880056926db704f9f713097915f99da346f5b1d1",
    "t10k-labels-idx1-ubyte": "958122e8b4b97fd4e71eca2d08ef754ed77c3ad9",
}
# Where torchvision, Debian and people put them.
_FOLDERS = ("fashion-mnist", "FashionMNIST/raw", ".")


def fashion_mnist(settings: DataSettings, root: Path) -> DatasetSources:
    """The official split; grey becomes three equal colours."""
    found = folder(root)
    if found is None:
        raise missing("fashion-mnist/", root, BY_HAND.format(root=root))
    train, test = (
        Arrays(
            _pixels(_content(found, f"{part}-images-idx3-ubyte")), _labels(_content(found, f"{part}-labels-idx1-ubyte"))
        )
        for part in ("train", "t10k")
    )
    return DatasetSources("Fashion-MNIST", NAMES, train, test)


BY_HAND = """\
Its four files go to {root}/fashion-mnist, packed (.gz) or not. Debian and Ubuntu have them as a package:
    apt install dataset-fashion-mnist      then --data /usr/share/datasets
torchvision downloads them as well:
    python -c "from torchvision.datasets import FashionMNIST as F; F('{root}', download=True)"
"""


def folder(root: Path) -> Path | None:
    """The folder in the root that holds the files."""
    first = next(iter(SUMS))
    return next((root / name for name in _FOLDERS if _file(root / name, first) is not None), None)


def _file(where: Path, name: str) -> Path | None:
    return next((path for path in (where / name, where / f"{name}.gz") if path.is_file()), None)


def _content(where: Path, name: str) -> bytes:
    path = _file(where, name)
    if path is None:
        raise FileNotFoundError(f"{where / name} is missing: put all four files there")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be unpacked ({error}): get it again") from error
    if hashlib.sha1(content).hexdigest() != SUMS[name]:
        raise ValueError(f"{path} is not the official file (its SHA-1 is another): get it again")
    return content


def _pixels(content: bytes) -> Tensor:
    """After 16 bytes of sizes, N x 28 x 28 bytes."""
    grey = torch.frombuffer(bytearray(content[16:]), dtype=torch.uint8).view(-1, 1, SIDE, SIDE)
    return grey.repeat(1, 3, 1, 1)


def _labels(content: bytes) -> Tensor:
    """After 8 bytes of sizes, N bytes."""
    return torch.frombuffer(bytearray(content[8:]), dtype=torch.uint8).long()
