"""Augmentation policies by name, each in two forms: for a batch in memory, and for one picture in a worker.

Both leave pixels in 0..255; normalising comes after. A policy for batches takes its random numbers from a generator,
one for pictures from the CPU's default generator, which the caller seeds and restores (see `disk`).
Shapes: B samples of a batch, H x W px.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import geometry
from .base import IGNORE

if TYPE_CHECKING:
    from PIL.Image import Image

Fill = tuple[int, int, int]
Size = tuple[int, int]
# (x (B, 3, H, W) uint8, y (B,) or (B, H, W), generator, fill) -> x (B, 3, H, W) in 0..255, y
BatchPolicy = Callable[[Tensor, Tensor, torch.Generator, Fill], tuple[Tensor, Tensor]]
# (picture, label or mask) -> (3, H, W) uint8, label or mask (H, W) uint8
SamplePolicy = Callable[["Image", Any], tuple[Tensor, Any]]

# As MMSegmentation trains: scales, the largest share of a crop that one class may have, and how often to try.
SCALES = (0.5, 2.0)
LARGEST_SHARE = 0.75
CROPS = 10
# Of ImageNet's usual crop: its share of the picture's area, and its width over its height.
AREAS = (0.08, 1.0)
RATIOS = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Policy:
    """One policy in both forms.

    tasks: "classification", "segmentation".
    batch: for pictures in memory; None: there is no such form.
    sample: (size, fill) to the form for pictures from disk.
    """

    tasks: tuple[str, ...]
    batch: BatchPolicy | None
    sample: Callable[[Size, Fill], SamplePolicy]


def none(x: Tensor, y: Tensor, generator: torch.Generator, fill: Fill) -> tuple[Tensor, Tensor]:
    """Pictures as they are."""
    return x, y


def crop_flip(x: Tensor, y: Tensor, generator: torch.Generator, fill: Fill) -> tuple[Tensor, Tensor]:
    """Pad with black, an eighth of the size on each side (4 px at 32), crop at random, flip half of the pictures."""
    B, _, H, W = x.shape
    top = torch.randint(0, 2 * (H // 8) + 1, (B, 1), generator=generator, device=x.device)
    left = torch.randint(0, 2 * (W // 8) + 1, (B, 1), generator=generator, device=x.device)
    rows_BH = top + torch.arange(H, device=x.device)
    columns = torch.arange(W, device=x.device)
    columns_BW = left + torch.where(_half(B, generator, x.device), columns.flip(0), columns)
    padded = F.pad(x, (W // 8, W // 8, H // 8, H // 8))
    sample, colour = torch.arange(B, device=x.device), torch.arange(3, device=x.device)
    return padded[
        sample[:, None, None, None], colour[:, None, None], rows_BH[:, None, :, None], columns_BW[:, None, None, :]
    ], y


def resized_crop(x: Tensor, y: Tensor, generator: torch.Generator, fill: Fill) -> tuple[Tensor, Tensor]:
    """A crop of random area and proportions, enlarged to the whole picture; half of the pictures are flipped.

    Unlike torchvision, a crop that would be too wide or high is cut off at the margin, not drawn again.
    """
    B, _, H, W = x.shape
    area = _uniform(*AREAS, B, generator, x.device)
    low, high = (torch.tensor(r).log().item() for r in RATIOS)
    ratio = _uniform(low, high, B, generator, x.device).exp()
    height = (area * H * W / ratio).sqrt().clamp(max=H)
    width = (area * H * W * ratio).sqrt().clamp(max=W)
    top = _uniform(0, 1, B, generator, x.device) * (H - height)
    left = _uniform(0, 1, B, generator, x.device) * (W - width)
    grid = _grid(top, left, height, width, _half(B, generator, x.device), (H, W))
    return F.grid_sample(x.float(), grid, padding_mode="border", align_corners=False), y


def segmentation(x: Tensor, y: Tensor, generator: torch.Generator, fill: Fill) -> tuple[Tensor, Tensor]:
    """Colours, scale, crop and flip, drawn for each picture, its mask (B, H, W) following it.

    Scales are from 0.5 to 2. A picture that became larger than (H, W) is cropped, one that became smaller is placed
    at random, with `fill` around it, and 255 in its mask. Brightness (up to 32 of 255) and contrast (a factor from 0.5
    to 1.5) change in half of the pictures each. Unlike from disk, hue and saturation stay, and a crop that shows
    nearly one class only is not drawn again.
    """
    B, _, H, W = x.shape
    device = x.device
    contrast = torch.where(_half(B, generator, device), _uniform(0.5, 1.5, (B, 1), generator, device), 1.0)
    brightness = torch.where(_half(B, generator, device), _uniform(-32, 32, (B, 1), generator, device), 0.0)
    background = torch.tensor(fill, dtype=torch.float32).view(1, 3, 1, 1).to(device, non_blocking=True)
    jittered = (x * contrast[..., None, None] + brightness[..., None, None]).clamp_(0, 255)
    # Padding that is in memory already stays as it is.
    padding = (x == background).all(1, keepdim=True) & (y == IGNORE).unsqueeze(1)
    jittered = torch.where(padding, background, jittered)
    scale = _uniform(*SCALES, B, generator, device)
    height, width = H / scale, W / scale
    # Of a smaller picture, the window is larger than the picture, and begins before it.
    top = _uniform(0, 1, B, generator, device) * (H - height)
    left = _uniform(0, 1, B, generator, device) * (W - width)
    grid = _grid(top, left, height, width, _half(B, generator, device), (H, W))
    # Sampling outside of the picture gives zero: so zero has to stand for the filling, and for no class.
    x = F.grid_sample(jittered - background, grid, align_corners=False) + background
    shifted = F.grid_sample((y.float() + 1).unsqueeze(1), grid, mode="nearest", align_corners=False).squeeze(1)
    return x, torch.where(shifted == 0, IGNORE, shifted.long() - 1)


def _half(B: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """(B, 1) bool, each true with probability a half."""
    return torch.rand(B, 1, generator=generator, device=device) < 0.5


def _uniform(
    low: float, high: float, shape: int | tuple[int, ...], generator: torch.Generator, device: torch.device
) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator, device=device)


def _grid(top: Tensor, left: Tensor, height: Tensor, width: Tensor, flip: Tensor, size: Size) -> Tensor:
    """(B, H, W, 2) for grid_sample: windows of the picture, (B,) each and in px, brought to `size`; flip is (B, 1)."""
    (H, W), device = size, top.device
    down = (torch.arange(H, device=device) + 0.5) / H
    right = (torch.arange(W, device=device) + 0.5) / W
    right_BW = torch.where(flip, 1 - right, right)
    # Edges of the picture are at -1 and 1.
    y_BH = (top[:, None] + down * height[:, None]) * 2 / H - 1
    x_BW = (left[:, None] + right_BW * width[:, None]) * 2 / W - 1
    B = len(top)
    return torch.stack((x_BW[:, None, :].expand(B, H, W), y_BH[:, :, None].expand(B, H, W)), dim=-1)


def _plain(picture: Image, target: Any, size: Size, fill: Fill) -> tuple[Tensor, Any]:
    """Not augmented, at the size of the training images."""
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


def _crop_flip_sample(size: Size, fill: Fill) -> SamplePolicy:
    from torchvision.transforms import v2

    H, W = size
    then = v2.Compose([v2.RandomCrop(size, padding=[W // 8, H // 8]), v2.RandomHorizontalFlip()])
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
    "crop-flip": Policy(("classification",), crop_flip, _crop_flip_sample),
    "resized-crop": Policy(("classification",), resized_crop, _resized_crop_sample),
    "autoaugment": Policy(("classification",), None, partial(_resized_crop_sample, more=True)),
    "segmentation": Policy(("segmentation",), segmentation, _segmentation_sample),
}


def policy(name: str, task: str) -> Policy:
    """A policy by name that suits the task."""
    suitable = [n for n, p in POLICIES.items() if task in p.tasks]
    if name not in suitable:
        raise ValueError(f"data.augment={name!r} is not for {task}: choose from {', '.join(suitable)}")
    return POLICIES[name]
