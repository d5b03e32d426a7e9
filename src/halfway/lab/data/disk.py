"""Data sets that stay on disk: a DataLoader decodes and augments pictures, one by one, while the device trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from . import geometry
from .augment import SamplePolicy
from .base import Colours, TestSet, TrainSet
from .sources import Source

PICTURE_SIDE = 128
# More samples than any batch has: no two (seed, position) share a sample seed.
_POSITIONS = 1_000_003


class DiskTrainSet(TrainSet):
    """Pictures of a source, augmented in workers."""

    def __init__(
        self,
        source: Source,
        classes: list[str],
        colours: Colours,
        policy: SamplePolicy,
        workers: int,
        device: torch.device,
    ) -> None:
        self.classes = classes
        self._source, self._colours, self._policy, self._device = source, colours, policy, device
        self._workers = workers

    def __len__(self) -> int:
        return len(self._source)

    @property
    def labels(self) -> Tensor | None:
        return self._source.labels

    def batches(self, plan: Sequence[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        loader = _loader(_Seeded(self._source, self._policy), _Rows(plan), self._workers, self._device)
        for (x, y), (ids, _) in zip(loader, plan, strict=True):
            yield (*_moved(x, y, self._colours, self._device), ids.to(self._device, non_blocking=True))

    def picture(self, id: int) -> Tensor:
        picture = geometry.shrink(self._source.read(id)[0], PICTURE_SIDE)
        return geometry.to_tensor(picture).permute(1, 2, 0).contiguous()

    def per_class(self, values: Tensor) -> Tensor | None:
        labels = self._source.labels
        if labels is None:
            return None
        # On the CPU: sums on a GPU would come out a little different each time.
        sums = torch.zeros(len(self.classes), dtype=values.dtype).index_add_(0, labels, values.cpu())
        return sums.to(values.device)

    def label(self, id: int) -> str:
        labels = self._source.labels
        return "" if labels is None else self.classes[int(labels[id])]


class DiskTestSet(TestSet):
    """Pictures of a source, not augmented."""

    def __init__(
        self, source: Source, colours: Colours, size: tuple[int, int], workers: int, device: torch.device
    ) -> None:
        self._source, self._colours, self._workers, self._device = source, colours, workers, device
        self._whole = source.labels is None
        self._policy: SamplePolicy = _whole if self._whole else partial(_margins_off, size=size)

    def __len__(self) -> int:
        return len(self._source)

    def batches(self, batch_size: int, rank: int = 0, ranks: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        mine = list(range(rank, len(self._source), ranks))
        step = 1 if self._whole else batch_size
        rows = [[(row, 0) for row in mine[i : i + step]] for i in range(0, len(mine), step)]
        for x, y in _loader(_Seeded(self._source, self._policy), rows, self._workers, self._device):
            yield _moved(x, y, self._colours, self._device)


def _whole(picture: Any, mask: Any) -> tuple[Tensor, Tensor]:
    return geometry.to_tensor(picture), torch.from_numpy(mask.copy())


def _margins_off(picture: Any, label: int, size: tuple[int, int]) -> tuple[Tensor, int]:
    """As usual for ImageNet: resized to a little more than needed (256 for 224), then cropped to the centre."""
    H, W = (round(n * 256 / 224) for n in size)
    return geometry.to_tensor(geometry.centre(geometry.cover(picture, (H, W)), size)), label


class _Seeded(Dataset[tuple[Tensor, Any]]):
    """Samples by (row, seed): a picture's augmentation depends only on its seed, in whichever worker it runs."""

    def __init__(self, source: Source, policy: SamplePolicy) -> None:
        self.source, self.policy = source, policy

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Any]:
        row, seed = key
        picture, target = self.source.read(row)
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which without workers would also seed the device the model trains on.
            torch.default_generator.manual_seed(seed)
            return self.policy(picture, target)


class _Rows:
    """A plan as lists of (row, seed), made on demand: an epoch of ImageNet has more than a million of them."""

    def __init__(self, plan: Sequence[tuple[Tensor, int]]) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for ids, seed in self.plan:
            yield [(row, (seed * _POSITIONS + position) % 2**63) for position, row in enumerate(ids.tolist())]


def _loader(
    data: _Seeded, rows: Iterable[list[tuple[int, int]]], workers: int, device: torch.device
) -> DataLoader[tuple[Tensor, Any]]:
    # An own generator, because a DataLoader would otherwise draw its workers' seed from the global one.
    return DataLoader(
        data,
        batch_sampler=rows,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator().manual_seed(0),
    )


def _moved(x: Tensor, y: Tensor, colours: Colours, device: torch.device) -> tuple[Tensor, Tensor]:
    """Move to the device as bytes, and normalise there."""
    return colours.normalise(x.to(device, non_blocking=True)), y.to(device, non_blocking=True).long()
