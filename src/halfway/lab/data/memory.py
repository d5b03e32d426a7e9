"""Data sets that fit in memory: decoded once, kept on the device, augmented a whole batch at a time.

Shapes: N samples of a set, B of a batch, C classes, H x W px.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor

from ..progress import Bar
from . import geometry
from .augment import BatchPolicy
from .base import IGNORE, Colours, TestSet, TrainSet
from .sources import Arrays, Source


def decode(source: Source, size: tuple[int, int], colours: Colours, workers: int, title: str) -> tuple[Tensor, Tensor]:
    """All pictures (N, 3, H, W) uint8 at one size, with labels (N,) int64 or masks (N, H, W) uint8.

    Pictures with labels cover `size` and lose their margins; pictures with masks fit in it and are padded.
    """
    if isinstance(source, Arrays):
        return resize(source.pixels, size), source.labels
    labels = source.labels
    pixels = torch.empty(len(source), 3, *size, dtype=torch.uint8)
    masks = torch.empty(len(source), *size, dtype=torch.uint8) if labels is None else None

    def put(row: int) -> None:
        picture, target = source.read(row)
        if masks is None:
            picture = geometry.cover(picture, size)
        else:
            picture, target = geometry.fit(picture, target, size, colours.fill)
            masks[row] = torch.from_numpy(target.copy())
        pixels[row] = geometry.to_tensor(picture)

    # Threads, because decoding happens outside of the interpreter. What takes a moment only shows no bar.
    with ThreadPoolExecutor(max(1, workers)) as pool, Bar(len(source), title, "image", delay=1.0) as bar:
        for _ in pool.map(put, range(len(source))):
            bar.update()
    if labels is not None:
        return pixels, labels
    assert masks is not None
    return pixels, masks


def resize(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """(N, 3, h, w) to (N, 3, H, W), both uint8: areas are averaged to make pictures smaller, bilinear to enlarge."""
    if pixels.shape[2:] == size:
        return pixels
    smaller = size[0] <= pixels.shape[2] and size[1] <= pixels.shape[3]
    # In pieces: in float all of it would take four times the memory of the data set.
    pieces = [
        F.interpolate(p.float(), size, mode="area" if smaller else "bilinear").round().to(torch.uint8)
        for p in pixels.split(4096)
    ]
    return torch.cat(pieces)


def occurrence(masks: Tensor, classes: int) -> Tensor:
    """(N, H, W) uint8 to (N, C) bool: which classes occur in a mask."""
    found = [
        torch.zeros(len(m), IGNORE + 1, dtype=torch.bool).scatter_(1, m.long(), True)
        for m in masks.flatten(1).split(64)
    ]
    return torch.cat(found)[:, :classes]


class MemoryTrainSet(TrainSet):
    """Pictures (N, 3, H, W) uint8 and labels (N,) int64 or masks (N, H, W) uint8, moved to the device."""

    def __init__(
        self,
        pixels: Tensor,
        targets: Tensor,
        classes: list[str],
        colours: Colours,
        policy: BatchPolicy,
        device: torch.device,
    ) -> None:
        self.classes = classes
        self._colours, self._policy, self._device = colours, policy, device
        # (N, C): a small table on the CPU, because it is rarely used.
        self._belongs = (
            occurrence(targets, len(classes)) if targets.ndim == 3 else F.one_hot(targets, len(classes)).bool()
        )
        self._pixels, self._targets = pixels.to(device), targets.to(device)

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def labels(self) -> Tensor | None:
        return self._targets.long().cpu() if self._targets.ndim == 1 else None

    def batches(self, plan: Sequence[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for ids, seed in plan:
            ids = ids.to(self._device, non_blocking=True)
            generator = torch.Generator(self._device).manual_seed(seed)
            x = self._policy(self._pixels[ids], generator)
            yield self._colours.normalise(x), self._targets[ids].long(), ids

    def picture(self, id: int) -> Tensor:
        return self._pixels[id].permute(1, 2, 0).contiguous().cpu()

    def per_class(self, values: Tensor) -> Tensor:
        return values @ self._belongs.to(values) if values.is_floating_point() else _counts(values, self._belongs)

    def label(self, id: int) -> str:
        names = [self.classes[c] for c in self._belongs[id].nonzero().flatten().tolist()]
        return ", ".join(n for n in names if n != "background") if self._targets.ndim == 3 else names[0]


def _counts(values: Tensor, belongs: Tensor) -> Tensor:
    """(N,) integers and (N, C) to (C,); a GPU has no product of integer matrices."""
    return (values.cpu().long() @ belongs.long()).to(values.device)


class MemoryTestSet(TestSet):
    """Pictures (N, 3, H, W) uint8 and labels (N,) int64 or masks (N, H, W) uint8, moved to the device."""

    def __init__(self, pixels: Tensor, targets: Tensor, colours: Colours, device: torch.device) -> None:
        self._pixels, self._targets, self._colours = pixels.to(device), targets.to(device), colours

    def __len__(self) -> int:
        return len(self._targets)

    def batches(self, batch_size: int, rank: int = 0, ranks: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        # Slices are views: nothing is copied but the batch.
        mine = self._pixels[rank::ranks], self._targets[rank::ranks]
        for start in range(0, len(mine[0]), batch_size):
            x, y = (t[start : start + batch_size] for t in mine)
            yield self._colours.normalise(x), y.long()
