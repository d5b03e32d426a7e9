"""Pictures that need no files and can be learned, to try out a recipe, a machine, or this library."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .base import IGNORE
from .sources import Source

if TYPE_CHECKING:
    from PIL.Image import Image

# Training and test pictures where the recipe does not say how many.
COUNTS = {"classification": (512, 128), "segmentation": (64, 16)}
NOISE = 24.0


class SyntheticPictures(Source):
    """Noisy pictures of about `size`, each a function of its number.

    With labels: each class has a colour and a place for its spot. With masks: rectangles of two classes, in their
    colours and each with a border to ignore, on a grey background of class 0.

    Args:
        task: "classification" or "segmentation".
        classes: how many.
        count: of pictures.
        size: (H, W), approximate; with `exact` all pictures have exactly this size.
        first: number of the first picture; test pictures begin where training pictures end.
    """

    def __init__(
        self, task: str, classes: int, count: int, size: tuple[int, int], exact: bool = False, first: int = 0
    ) -> None:
        self.task, self.classes, self.size, self.exact = task, classes, size, exact
        self.numbers = list(range(first, first + count))

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, row: int) -> tuple[Image, Any]:
        import numpy as np
        from PIL import Image

        number = self.numbers[row]
        random = np.random.default_rng(number)
        h, w = self.size if self.exact else (round(n * random.uniform(0.8, 1.5)) for n in self.size)
        clean = np.full((h, w, 3), 110.0)
        target: Any
        if self.task == "classification":
            target = number % self.classes
            _spot(clean, target, self.classes)
        else:
            target = np.zeros((h, w), np.uint8)
            for k in range(2):
                _rectangle(clean, target, 1 + (number + k) % max(1, self.classes - 1), self.classes, random)
        noisy = clean + NOISE * random.standard_normal(clean.shape)
        return Image.fromarray(noisy.clip(0, 255).astype(np.uint8)), target

    def content(self, row: int) -> bytes:
        return f"synthetic {self.numbers[row]} ".encode()  # of any size

    def take(self, rows: Sequence[int]) -> SyntheticPictures:
        chosen = SyntheticPictures(self.task, self.classes, 0, self.size, self.exact)
        chosen.numbers = [self.numbers[r] for r in rows]
        return chosen

    @property
    def labels(self) -> Tensor | None:
        if self.task == "segmentation":
            return None
        return torch.tensor([n % self.classes for n in self.numbers], dtype=torch.long)


def colour(index: int, classes: int) -> tuple[float, float, float]:
    """One of `classes` colours around the circle, light and dark by turns."""
    r, g, b = colorsys.hsv_to_rgb(index / classes, 0.9, 0.95 if index % 2 else 0.7)
    return 255 * r, 255 * g, 255 * b


def _spot(clean: Any, label: int, classes: int) -> None:
    """Draw the spot of a class into (h, w, 3), a third of the picture wide; places go around the centre."""
    import numpy as np

    h, w = clean.shape[:2]
    angle = 2 * np.pi * label / classes
    down, right = h * (0.5 + 0.2 * np.sin(angle)), w * (0.5 + 0.2 * np.cos(angle))
    y, x = np.mgrid[:h, :w]
    clean[((y - down) / h) ** 2 + ((x - right) / w) ** 2 < 0.04] = colour(label, classes)


def _rectangle(clean: Any, mask: Any, index: int, classes: int, random: Any) -> None:
    """Draw a rectangle of a class somewhere into (h, w, 3) and (h, w)."""
    h, w = mask.shape
    tall, wide = max(3, round(h * random.uniform(0.3, 0.5))), max(3, round(w * random.uniform(0.3, 0.5)))
    top, left = int(random.integers(0, max(1, h - tall))), int(random.integers(0, max(1, w - wide)))
    mask[top : top + tall, left : left + wide] = IGNORE
    mask[top + 1 : top + tall - 1, left + 1 : left + wide - 1] = min(index, classes - 1)
    clean[top : top + tall, left : left + wide] = colour(index, classes)
