"""Bringing pictures of any size to one size, the same way in memory and from disk. PIL in, PIL or arrays out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .base import IGNORE

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]


def cover(picture: Image, size: Size) -> Image:
    """Resize, keeping proportions, until `size` (H, W) is just covered, and crop the centre."""
    from PIL.Image import Resampling

    (H, W), (h, w) = size, (picture.height, picture.width)
    if (h, w) != (H, W):
        # The longer side is rounded down, as torchvision's Resize does it.
        to = (max(W, H * w // h), H) if h * W <= w * H else (W, max(H, W * h // w))
        picture = picture.resize(to, Resampling.BILINEAR)
    return centre(picture, size)


def centre(picture: Image, size: Size) -> Image:
    """The centre (H, W) of a picture that is at least as large."""
    H, W = size
    top, left = round((picture.height - H) / 2), round((picture.width - W) / 2)
    return picture.crop((left, top, left + W, top + H))


def fit(picture: Image, mask: Any, size: Size, fill: tuple[int, int, int]) -> tuple[Image, Any]:
    """Resize a picture and its mask (h, w), keeping proportions, until they just fit in `size`, and pad all around.

    The padding is of the colour `fill` in the picture and 255 in the mask. The picture sits in the centre, so that a
    crop of half the height and width always meets it.
    """
    import numpy as np
    from PIL import Image

    (H, W), (h, w) = size, (picture.height, picture.width)
    to = (max(1, round(H * w / h)), H) if h * W >= w * H else (W, max(1, round(W * h / w)))
    left, top = (W - to[0]) // 2, (H - to[1]) // 2
    picture_out, mask_out = Image.new("RGB", (W, H), fill), Image.new("L", (W, H), IGNORE)
    picture_out.paste(picture.resize(to, Image.Resampling.BILINEAR), (left, top))
    mask_out.paste(Image.fromarray(mask).resize(to, Image.Resampling.NEAREST), (left, top))
    return picture_out, np.asarray(mask_out)


def shrink(picture: Image, side: int) -> Image:
    """At most `side` px on the shorter side."""
    from PIL.Image import Resampling

    factor = side / min(picture.size)
    if factor >= 1:
        return picture
    return picture.resize(
        (max(1, round(picture.width * factor)), max(1, round(picture.height * factor))), Resampling.BILINEAR
    )


def to_tensor(picture: Image) -> Tensor:
    """(3, H, W) uint8."""
    import numpy as np

    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()
