"""Augmentation policies by name: all of them for single pictures in a worker, some also for a batch in memory.

A policy with both forms does the same in both. Pixels stay in 0..255; normalisation comes later. The form for batches
takes its random numbers from a generator, the form for pictures from the CPU's default generator, which the caller
seeds and restores (see `disk`).
Shapes: B samples of a batch, H x W px.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from . import geometry
from .base import IGNORE

if TYPE_CHECKING:
    from PIL.Image import Image

Fill = tuple[int, int, int]
Size = tuple[int, int]
# (x (B, 3, H, W) uint8, generator) -> x of the same shape and type; targets stay as they are
BatchPolicy = Callable[[Tensor, torch.Generator], Tensor]
# (picture, label or mask) -> (3, H, W) uint8, label or mask (H, W) uint8
SamplePolicy = Callable[["Image", Any], tuple[Tensor, Any]]

# As in MMSegmentation: scales, the largest share of a crop that one class may have, and how often to try.
SCALES = (0.5, 2.0)
LARGEST_SHARE = 0.75
CROPS = 10
# ImageNet's usual crop: its share of the picture's area, and its width over its height.
AREAS = (0.08, 1.0)
RATIOS = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Policy:
    """One policy in its forms.

    tasks: "classification", "segmentation".
    batch: the form for pictures in memory; None if the policy only works on pictures from disk.
    sample: (size, fill) -> the form for pictures from disk.
    """

    tasks: tuple[str, ...]
    batch: BatchPolicy | None
    sample: Callable[[Size, Fill], SamplePolicy]


def none(x: Tensor, generator: torch.Generator) -> Tensor:
    """Pictures as they are."""
    return x


def crop(x: Tensor, generator: torch.Generator, flip: bool = False) -> Tensor:
    """Pad with black, an eighth of the size on each side (4 px at 32), and crop at random."""
    B, _, H, W = x.shape
    top = torch.randint(0, 2 * (H // 8) + 1, (B, 1), generator=generator, device=x.device)
    left = torch.randint(0, 2 * (W // 8) + 1, (B, 1), generator=generator, device=x.device)
    rows_BH = top + torch.arange(H, device=x.device)
    columns = torch.arange(W, device=x.device)
    columns_BW = left + (torch.where(_half(B, generator, x.device), columns.flip(0), columns) if flip else columns)
    return _picked(F.pad(x, (W // 8, W // 8, H // 8, H // 8)), rows_BH, columns_BW)


def crop_flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Like `crop`, and flip half of the pictures."""
    return crop(x, generator, flip=True)


def shift_flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Move by up to a sixteenth of the size (2 px at 32), mirrored at the edges, and flip half of the pictures."""
    B, _, H, W = x.shape
    down, right = (
        torch.randint(-(side // 16), side // 16 + 1, (B, 1), generator=generator, device=x.device) for side in (H, W)
    )
    columns = torch.arange(W, device=x.device)
    columns_BW = torch.where(_half(B, generator, x.device), columns.flip(0), columns)
    return _picked(x, _mirrored(torch.arange(H, device=x.device) + down, H), _mirrored(columns_BW + right, W))


def _mirrored(places: Tensor, side: int) -> Tensor:
    """Places beyond an edge as the ones that lie as far within it."""
    return (side - 1) - ((side - 1) - places.abs()).abs()


def _picked(x: Tensor, rows_BH: Tensor, columns_BW: Tensor) -> Tensor:
    sample, colour = torch.arange(len(x), device=x.device), torch.arange(3, device=x.device)
    return x[
        sample[:, None, None, None], colour[:, None, None], rows_BH[:, None, :, None], columns_BW[:, None, None, :]
    ]


def _half(B: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """(B, 1) bool, each true with probability a half."""
    return torch.rand(B, 1, generator=generator, device=device) < 0.5


def _plain(picture: Image, target: Any, size: Size, fill: Fill) -> tuple[Tensor, Any]:
    """The picture at the size of the training images, not augmented."""
    if isinstance(target, int):
        return geometry.to_tensor(geometry.cover(picture, size)), target
    picture, target = geometry.fit(picture, target, size, fill)
    return geometry.to_tensor(picture), torch.from_numpy(target.copy())


def _transformed(picture: Image, target: Any, first: Callable[[Image], Image], then: Any) -> tuple[Tensor, Any]:
    """torchvision's transforms on a picture with a label."""
    return geometry.to_tensor(then(first(picture))), target


def _same(picture: Image) -> Image:
    return picture


def _plain_sample(size: Size, fill: Fill) -> SamplePolicy:
    return partial(_plain, size=size, fill=fill)


def _crop_sample(
    size: Size, fill: Fill, flip: bool = False, part: int = 8, mode: Literal["constant", "reflect"] = "constant"
) -> SamplePolicy:
    from torchvision.transforms import v2

    H, W = size
    flips = [v2.RandomHorizontalFlip()] if flip else []
    then = v2.Compose([v2.RandomCrop(size, padding=[W // part, H // part], padding_mode=mode), *flips])
    return partial(_transformed, first=partial(geometry.cover, size=size), then=then)


def _resized_crop_sample(size: Size, fill: Fill, more: bool = False) -> SamplePolicy:
    from torchvision.transforms import v2

    steps = [
        v2.RandomResizedCrop(size, AREAS, RATIOS),
        v2.RandomHorizontalFlip(),
        *([v2.AutoAugment()] if more else []),
    ]
    return partial(_transformed, first=_same, then=v2.Compose(steps))


def _segmentation_sample(size: Size, fill: Fill) -> SamplePolicy:
    from torchvision.transforms import v2

    # Not RandomPhotometricDistort: it also swaps red, green and blue, which MMSegmentation does not.
    changes = ({"brightness": 32 / 255}, {"contrast": 0.5}, {"saturation": 0.5}, {"hue": 18 / 360})
    colours = v2.Compose([v2.RandomApply([v2.ColorJitter(**change)], p=0.5) for change in changes])
    return partial(_scaled_crop, size=size, fill=fill, colours=colours)


def _scaled_crop(picture: Image, mask: Any, size: Size, fill: Fill, colours: Any) -> tuple[Tensor, Tensor]:
    """Scale, crop, flip, change colours, and pad what is too small at the right and at the bottom.

    The scale, from 0.5 to 2, is relative to the picture's own size.
    """
    from torchvision import tv_tensors
    from torchvision.transforms import v2
    from torchvision.transforms.v2 import functional as V

    (H, W), scale = size, float(torch.empty(()).uniform_(*SCALES))
    h, w = (max(1, round(n * scale)) for n in mask.shape)
    image, labels = (
        V.resize(t, [h, w])
        for t in (
            tv_tensors.Image(geometry.to_tensor(picture)),
            tv_tensors.Mask(torch.from_numpy(mask.copy()).unsqueeze(0)),
        )
    )
    for _ in range(CROPS):
        top, left = (int(torch.randint(0, max(0, have - want) + 1, ())) for have, want in ((h, H), (w, W)))
        window = top, left, min(h, H), min(w, W)
        if varied(V.crop(labels, *window)):
            break
    image, labels = v2.RandomHorizontalFlip()(V.crop(image, *window), V.crop(labels, *window))
    margin = [0, 0, W - image.shape[-1], H - image.shape[-2]]
    image = V.pad(colours(image), margin, fill=list(fill))
    labels = V.pad(labels, margin, fill=IGNORE)
    return image.as_subclass(Tensor), labels.as_subclass(Tensor).squeeze(0)


def varied(mask: Tensor) -> bool:
    """Whether a crop shows more than one class, none of them on nearly all of it."""
    counts = torch.bincount(mask.flatten().long(), minlength=IGNORE + 1)[:IGNORE]
    return bool((counts > 0).sum() > 1) and float(counts.max() / counts.sum()) < LARGEST_SHARE


POLICIES = {
    "none": Policy(("classification", "segmentation"), none, _plain_sample),
    "crop": Policy(("classification",), crop, _crop_sample),
    "crop-flip": Policy(("classification",), crop_flip, partial(_crop_sample, flip=True)),
    "shift-flip": Policy(("classification",), shift_flip, partial(_crop_sample, flip=True, part=16, mode="reflect")),
    "resized-crop": Policy(("classification",), None, _resized_crop_sample),
    "autoaugment": Policy(("classification",), None, partial(_resized_crop_sample, more=True)),
    "segmentation": Policy(("segmentation",), None, _segmentation_sample),
}


def policy(name: str, task: str) -> Policy:
    """A policy by name that suits the task."""
    suitable = [n for n, p in POLICIES.items() if task in p.tasks]
    if name not in suitable:
        raise ValueError(f"data.augment={name!r} is not for {task}: choose from {', '.join(suitable)}")
    return POLICIES[name]


def batch_form(name: str, task: str, fix: str) -> BatchPolicy:
    """The form of a policy for pictures in memory. fix: what to do instead, for the error if there is none."""
    batch = policy(name, task).batch
    if batch is None:
        others = " or ".join(n for n, p in POLICIES.items() if task in p.tasks and p.batch is not None)
        raise ValueError(
            f"data.augment={name!r} does not work on images in memory: {fix}data.augment={others}. (halfway 0.1.0 had "
            "another policy under this name for resized-crop and segmentation in memory; it was removed, and a run "
            "with it cannot be resumed.)"
        )
    return batch
