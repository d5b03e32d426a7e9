"""The interface between data sets, in memory or on disk, and the training loop.

Shapes: N samples of a set, B of a batch, C classes, H x W px.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# In a mask this value is no class: neither learned nor scored.
from ...selectors.tools.losses import IGNORE as IGNORE


@dataclass(frozen=True)
class Colours:
    """Mean and standard deviation of each colour, for pixels in [0, 1]."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def fill(self) -> tuple[int, int, int]:
        """The mean colour as a pixel, for padding: normalised, it is about zero."""
        r, g, b = (round(255 * m) for m in self.mean)
        return r, g, b

    def normalise(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) in 0..255, of any dtype, to float32 of mean 0 and standard deviation 1."""
        mean, std = (_row(v, x.device) for v in (self.mean, self.std))
        return x.to(torch.float32).div_(255).sub_(mean).div_(std) if x.dtype == torch.uint8 else (x / 255 - mean) / std


def _row(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1).to(device, non_blocking=True)


IMAGENET = Colours((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class TrainSet(ABC):
    """Training samples with ids 0..N-1: positions in this set, after a subset was taken.

    Attributes:
        classes: names, C of them.
    """

    classes: list[str]

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def labels(self) -> Tensor | None:
        """(N,) int64 on the CPU; None in segmentation."""
        return None

    @abstractmethod
    def batches(self, plan: Sequence[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The batches of a plan, augmented, on the device.

        Augmentation depends only on a batch's seed and on the position in the batch: the rest of a plan gives the same
        tensors, bit for bit, as the whole plan does, with any number of workers.

        Args:
            plan: (ids (B,) int64, seed) of each batch, in order.

        Yields:
            x (B, 3, H, W) float32, normalised; y (B,) int64 labels or (B, H, W) int64 masks with 255 for pixels to
            ignore; ids (B,) int64.
        """

    @abstractmethod
    def picture(self, id: int) -> Tensor:
        """The sample as a picture (H, W, 3) uint8 on the CPU, not augmented; from disk at most 128 px wide or high."""

    @abstractmethod
    def per_class(self, values: Tensor) -> Tensor | None:
        """(C,) sums over each class of the samples' values (N,).

        In segmentation a sample belongs to each class that occurs in its mask. None if that would take reading all
        masks from disk.
        """

    @abstractmethod
    def label(self, id: int) -> str:
        """A caption: the class of a sample; in segmentation its classes without the background, "" if unknown."""


class TestSet(ABC):
    """Test samples, never augmented."""

    __test__ = False  # its name makes pytest look for tests in here

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batches(self, batch_size: int, rank: int = 0, ranks: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's share: samples rank, rank + ranks, ... All ranks together see each sample exactly once.

        Yields:
            x (B, 3, H, W) float32, normalised, and y (B,) or (B, H, W) int64, on the device. Segmentation from disk
            yields whole images of different sizes, one by one, whatever the batch size.
        """


@dataclass(frozen=True)
class HeldOut:
    """A fold of the training images that is not trained on.

    images: not augmented.
    ids: (n,) int64, their ids among all training images.
    of: N, how many these are.
    """

    images: TrainSet
    ids: Tensor
    of: int


@dataclass(frozen=True)
class Data:
    """A data set, ready to train on.

    classes: names.
    description: one line: which files, how many images.
    trained_on: the training images, not augmented.
    held_out: the fold that is left out of `train`, if one is.
    images: a digest of the different training images, equal wherever they are stored.
    """

    classes: list[str]
    train: TrainSet
    test: TestSet
    trained_on: TestSet
    description: str
    held_out: HeldOut | None = None
    images: str = ""
