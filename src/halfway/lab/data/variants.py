"""Training images made harder in one known way: wrong labels, a tail of rare classes, near-copies.

Each is a function of the data alone, so that all seeds and methods train on the same images. Validation and test images
are never touched. Together they apply in this order: tail, copies, wrong labels.

Shapes: N images, D different ones, C classes, H x W px.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...seeds import seed_of
from .settings import DataSettings
from .sources import Arrays, Source

if TYPE_CHECKING:
    from PIL.Image import Image

# Not the run's seed: runs with different seeds must see the same images.
_SEED = 20_240_609
# Of a near-copy: the largest shift as a share of the shorter side, and the largest changes of contrast and of
# brightness (of 255); the noise is a standard deviation.
_SHIFT, _CONTRAST, _BRIGHTNESS, _NOISE = 1 / 16, 0.1, 10.0, 3.0


def check(settings: DataSettings, task: str, title: str) -> None:
    """Raise unless the settings fit each other and the data set."""
    wrong, imbalance, copies = settings.wrong_labels, settings.imbalance, settings.copies
    if not 0 <= wrong <= 1:
        raise ValueError(f"data.wrong_labels is a share of the labels, from 0 to 1, got {wrong:g}")
    if imbalance is not None and imbalance < 1:
        raise ValueError(
            f"data.imbalance is how many times larger the first class is than the last, at least 1, got {imbalance:g}"
        )
    if copies < 1:
        raise ValueError(f"data.copies is how often an image occurs, at least 1, got {copies}")
    used = {"wrong_labels": wrong > 0, "imbalance": imbalance is not None, "copies": copies > 1}
    for name in (name for name, is_used in used.items() if is_used):
        if task != "classification":
            raise ValueError(f"data.{name} is for images with one label, and {title} has masks: leave it out")
        if settings.holdout and name != "wrong_labels":
            raise ValueError(f"data.holdout and data.{name} exclude each other: set one of them")
    if copies > 1 and (settings.train_samples is None or settings.train_samples % copies):
        raise ValueError(
            f"data.copies={copies} needs a data.train_samples that is a multiple of {copies}, got "
            f"{settings.train_samples}: each of train_samples/{copies} images occurs {copies} times"
        )


def different(settings: DataSettings) -> int | None:
    """D, how many different images are trained on; None: all."""
    return None if settings.train_samples is None else settings.train_samples // settings.copies


def apply(source: Source, settings: DataSettings, classes: int) -> tuple[Source, str]:
    """Copies and wrong labels of the different images that were chosen, and what was done, for people to read."""
    labels, notes = source.labels, []
    if labels is None:
        return source, ""
    if settings.imbalance is not None:
        counts = labels.bincount(minlength=classes).tolist()
        notes.append(f"{max(counts):,} of the first class, {min(counts):,} of the last")
    rows = torch.arange(len(source)).repeat(settings.copies)
    copy_N = torch.arange(settings.copies).repeat_interleave(len(source))
    if settings.copies > 1:
        notes.append(f"{len(source):,} different ones, each {settings.copies} times as near-copies")
    labels_N, count = with_wrong_labels(labels[rows], settings.wrong_labels, classes)
    if count:
        notes.append(f"{count:,} labels are wrong")
    if settings.copies > 1 or count:
        varied = Varied(source, rows, labels_N, copy_N)
        source = varied.in_memory() if isinstance(source, Arrays) else varied
    return source, f" ({'; '.join(notes)})" if notes else ""


# ------------------------------------------------------------------ wrong labels


def with_wrong_labels(labels_N: Tensor, share: float, classes: int) -> tuple[Tensor, int]:
    """The labels, of which round(share * N) are another class, each of the others equally often on average; and how
    many these are."""
    random = torch.Generator().manual_seed(_SEED)
    count = round(share * len(labels_N))
    if classes < 2 and count:
        raise ValueError("data.wrong_labels needs a second class to choose from: leave it out")
    chosen = torch.randperm(len(labels_N), generator=random)[:count]
    changed_N = labels_N.clone()
    changed_N[chosen] = (labels_N[chosen] + torch.randint(1, max(2, classes), (count,), generator=random)) % classes
    return changed_N, count


# -------------------------------------------------------------------------- tail


def tailed(source: Source, total: int | None, imbalance: float, names: Sequence[str], order: Tensor) -> Source:
    """Class c keeps n_max * imbalance^(-c / (C - 1)) images, the first of its own in `order`.

    The test images stay as they are. Where these are balanced, as in CIFAR, the share of right answers is the balanced
    accuracy: rare classes count as much as the others.

    Args:
        total: all classes together, which decides n_max; None: the first class keeps all.
        order: (N,) the images in random order, so that a smaller tail is part of a larger one.
    """
    labels = source.labels
    assert labels is not None  # see `check`
    there_C = labels.bincount(minlength=len(names)).tolist()
    counts_C = tail(there_C, total, imbalance, names)
    ordered = labels[order]
    kept = [order[ordered == c][:count] for c, count in enumerate(counts_C)]
    return source.take(torch.cat(kept).sort().values.tolist())


def tail(there_C: Sequence[int], total: int | None, imbalance: float, names: Sequence[str]) -> list[int]:
    """(C,) how many images each class keeps. there_C: how many there are."""
    weights_C = [imbalance ** (-c / max(1, len(there_C) - 1)) for c in range(len(there_C))]
    most = min(n / weight for n, weight in zip(there_C, weights_C, strict=True))
    counts_C = (
        [round(there_C[0] * weight) for weight in weights_C] if total is None else rounded_shares(weights_C, total)
    )
    for name, count, there in zip(names, counts_C, there_C, strict=True):
        if count > there:
            raise ValueError(
                f"data.imbalance={imbalance:g} takes {count:,} images of {name!r}, but there are {there:,}: set "
                f"data.train_samples to at most {int(int(most) * sum(weights_C))} (times data.copies)"
            )
        if count == 0:
            raise ValueError(
                f"data.imbalance={imbalance:g} leaves no image of {name!r}: choose a smaller one, or more train_samples"
            )
    return counts_C


def rounded_shares(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to the weights, of this total: those with the largest rest are rounded up."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_rest[: total - sum(counts)]:
        counts[i] += 1
    return counts


# ------------------------------------------------------------------------ copies


class Varied(Source):
    """Images of another source with labels of their own, some as near-copies.

    Args:
        rows: (N,) of the other source.
        labels: (N,) int64.
        copy_N: (N,) which near-copy, counted from 1; 0: the image itself.
    """

    def __init__(self, source: Source, rows: Tensor, labels: Tensor, copy_N: Tensor) -> None:
        self.source, self.rows, self._labels, self.copy_N = source, rows, labels, copy_N

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, row: int) -> tuple[Image, Any]:
        from . import geometry

        original, copy, label = (int(t[row]) for t in (self.rows, self.copy_N, self._labels))
        picture, _ = self.source.read(original)
        if not copy:
            return picture, label
        from PIL import Image

        made = near_copy(geometry.to_tensor(picture), seed_of(_SEED, original, copy))
        return Image.fromarray(made.permute(1, 2, 0).contiguous().numpy()), label

    def take(self, rows: Sequence[int]) -> Varied:
        index = torch.as_tensor(rows, dtype=torch.long)
        return Varied(self.source, self.rows[index], self._labels[index], self.copy_N[index])

    def in_memory(self) -> Arrays:
        """The same, from a source in memory."""
        assert isinstance(self.source, Arrays)
        pixels = self.source.pixels[self.rows]
        for i in self.copy_N.nonzero().flatten().tolist():
            pixels[i] = near_copy(pixels[i], seed_of(_SEED, int(self.rows[i]), int(self.copy_N[i])))
        return Arrays(pixels, self._labels, self.rows)

    @property
    def labels(self) -> Tensor:
        return self._labels

    @property
    def originals(self) -> Tensor:
        return self.rows


def near_copy(pixels: Tensor, seed: int) -> Tensor:
    """(3, H, W) uint8: moved by up to a sixteenth of a side, a little lighter or darker, with a little noise.

    The border is continued, and the noise is the same in all colours: grey stays grey.
    """
    random = torch.Generator().manual_seed(seed)
    height, width = pixels.shape[1:]
    reach = max(1, round(min(height, width) * _SHIFT))
    down, right = torch.randint(-reach, reach + 1, (2,), generator=random).tolist()
    rows, columns = (
        (torch.arange(height) - down).clamp(0, height - 1),
        (torch.arange(width) - right).clamp(0, width - 1),
    )
    moved = pixels[:, rows][:, :, columns].float()
    contrast, brightness = (2 * torch.rand(2, generator=random) - 1).tolist()
    mean = moved.mean()
    changed = mean + (1 + _CONTRAST * contrast) * (moved - mean) + _BRIGHTNESS * brightness
    noise = _NOISE * torch.randn(1, height, width, generator=random)
    return (changed + noise).round().clamp(0, 255).to(torch.uint8)
