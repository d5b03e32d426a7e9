"""Where pictures come from: files, or arrays in memory. One picture at a time, as stored."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .base import IGNORE

if TYPE_CHECKING:
    from PIL.Image import Image

# Pictures that a digest is made from: what tells data sets apart is all over them.
_LOOKED_AT = 64


class Source(ABC):
    """Pictures and their targets. It is sent to the workers of a DataLoader, so it must pickle."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, row: int) -> tuple[Image, Any]:
        """An RGB picture with its label (int) or mask, a NumPy array (H, W) uint8 of the picture's size."""

    @abstractmethod
    def take(self, rows: Sequence[int]) -> Source:
        """A source with only these rows, in this order."""

    @property
    def labels(self) -> Tensor | None:
        """(N,) int64; None in segmentation."""
        return None

    @property
    def originals(self) -> Tensor | None:
        """(N,) int64, for a source that makes copies: pictures of the same number are made from the same one."""
        return None

    def content(self, row: int) -> bytes:
        """What a picture is known by, wherever it is stored."""
        return self.read(row)[0].tobytes()

    def digest(self) -> str:
        """Distinguishes these pictures from others with the same labels, by some of them, evenly spaced."""
        found = hashlib.sha256()
        for row in range(0, len(self), max(1, len(self) // _LOOKED_AT)):
            found.update(self.content(row))
        return found.hexdigest()[:16]


@dataclass(frozen=True)
class DatasetSources:
    """The training and test pictures of a data set.

    title: name of the data set and its release, for people to read.
    classes: their names.
    """

    title: str
    classes: list[str]
    train: Source
    test: Source


class Arrays(Source):
    """Pictures (N, 3, H, W) uint8 with labels (N,) int64. originals: see there."""

    def __init__(self, pixels: Tensor, labels: Tensor, originals: Tensor | None = None) -> None:
        self.pixels = pixels
        self._labels, self._originals = labels, originals

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, row: int) -> tuple[Image, Any]:
        from PIL import Image

        return Image.fromarray(self.pixels[row].permute(1, 2, 0).contiguous().numpy()), int(self._labels[row])

    def take(self, rows: Sequence[int]) -> Arrays:
        index = torch.as_tensor(rows, dtype=torch.long)
        originals = None if self._originals is None else self._originals[index]
        return Arrays(self.pixels[index], self._labels[index], originals)

    @property
    def labels(self) -> Tensor:
        return self._labels

    @property
    def originals(self) -> Tensor | None:
        return self._originals


class LabelledFiles(Source):
    """One picture per file, with labels (N,) int64."""

    def __init__(self, paths: Sequence[Path], labels: Tensor) -> None:
        self.paths = list(paths)
        self._labels = labels

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, row: int) -> tuple[Image, Any]:
        return open_picture(self.paths[row]), int(self._labels[row])

    def take(self, rows: Sequence[int]) -> LabelledFiles:
        return LabelledFiles([self.paths[r] for r in rows], self._labels[torch.as_tensor(rows, dtype=torch.long)])

    def content(self, row: int) -> bytes:
        return self.paths[row].read_bytes()  # as stored: decoders differ

    def digest(self) -> str:
        names = "/".join(path.name for path in self.paths)
        return hashlib.sha256(f"{names} {super().digest()}".encode(errors="surrogateescape")).hexdigest()[:16]

    @property
    def labels(self) -> Tensor:
        return self._labels


class MaskedFiles(Source):
    """A picture and a mask per file.

    Args:
        paths, masks: files, in the same order.
        classes: how many; a mask with a larger number is an error.
        table: 256 numbers, the class for each value in the files; None: the values are classes.
    """

    def __init__(
        self, paths: Sequence[Path], masks: Sequence[Path], classes: int, table: Sequence[int] | None = None
    ) -> None:
        self.paths, self.masks, self.classes, self.table = list(paths), list(masks), classes, table

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, row: int) -> tuple[Image, Any]:
        import numpy as np

        picture, path = open_picture(self.paths[row]), self.masks[row]
        mask = np.asarray(open_picture(path, mode=None))
        if mask.ndim != 2 or mask.dtype != np.uint8:
            raise ValueError(
                f"{path} is not a mask: it must have one channel of 8 bits, a pixel's value being its class (a palette "
                "is fine)"
            )
        if mask.shape != (picture.height, picture.width):
            raise ValueError(
                f"{path} is {mask.shape[1]} x {mask.shape[0]} px, its image {picture.width} x {picture.height}: they "
                "must be of the same size"
            )
        if self.table is not None:
            return picture, np.asarray(self.table, dtype=np.uint8)[mask]
        wrong = mask[(mask >= self.classes) & (mask != IGNORE)]
        if wrong.size:
            raise ValueError(
                f"{path} has class {wrong.max()}, but data.classes={self.classes} allows 0 to {self.classes - 1}, and "
                f"{IGNORE} for pixels to ignore"
            )
        return picture, mask

    def take(self, rows: Sequence[int]) -> MaskedFiles:
        return MaskedFiles([self.paths[r] for r in rows], [self.masks[r] for r in rows], self.classes, self.table)


def open_picture(path: Path, mode: str | None = "RGB") -> Image:
    """Decode a file; None for the mode leaves values as they are stored."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            picture.load()
            return picture if mode is None else picture.convert(mode)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: the data set is not complete, unpack it again") from None
    except (OSError, SyntaxError) as error:
        raise OSError(f"{path} cannot be decoded ({error}): unpack or download it again") from error


def missing(looked_for: str, root: Path, advice: str) -> FileNotFoundError:
    """The error for a data set that is not there: what to get, and where it goes."""
    return FileNotFoundError(f"no {looked_for} in {root}\n{advice}")
