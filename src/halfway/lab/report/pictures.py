"""Small pictures of the training set, embedded in the page."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import data as data_sets
from ..data import Data
from ..recipes.schema import Recipe
from . import page

SIDE = 64  # px, the longer one
FEW = 32  # px; up to this size pixels are shown sharp, and a PNG is smaller than the header of a JPEG


@dataclass(frozen=True)
class Pictures:
    """The pictures of the training set, or why there are none. data: None if it cannot be read."""

    data: Data | None
    reason: str = ""

    def image(self, id: int, alt: str) -> dict[str, Any]:
        """One sample. alt: what it shows."""
        assert self.data is not None
        pixels = _small(self.data.train.picture(id))
        height, width = pixels.shape[:2]
        source = page.png(pixels) if max(height, width) <= FEW else page.jpeg(pixels)
        return {"source": source, "width": width, "height": height, "alt": alt}

    @property
    def kind(self) -> str:
        """CSS classes for a list of them."""
        assert self.data is not None
        return "small-pixels" if max(self.data.train.picture(0).shape[:2]) <= FEW else ""


def load_pictures(recipe: Recipe, root: str | None, samples: int | None) -> Pictures:
    """The data set of the runs. samples: how many training samples they saw."""
    advice = "halfway report ... --data DIR, with the folder of the data set, adds them."
    try:
        found = data_sets.load(recipe.data, root or recipe.root)
    except (OSError, ValueError) as error:
        # The page must not reveal paths of this machine; the terminal may.
        print(f"no pictures and no centroids: {error}", file=sys.stderr)
        return Pictures(None, f"The data set was not found when this page was written. {advice}")
    if samples is not None and len(found.train) != samples:
        print(f"no pictures and no centroids: {found.description}; the runs saw {samples:,}", file=sys.stderr)
        return Pictures(
            None,
            f"The data set found when this page was written has {len(found.train):,} training samples, but the runs "
            f"saw {samples:,}. {advice}",
        )
    return Pictures(found)


def class_names(recipe: Recipe, pictures: Pictures, count: int) -> list[str]:
    """Names of the classes; numbers if the names are only known from missing data."""
    if pictures.data is not None:
        return pictures.data.classes
    known = data_sets.SETS[recipe.data.name].names
    return known if known is not None and len(known) == count else [f"class {i}" for i in range(count)]


def _small(pixels: Tensor) -> Tensor:
    """(H, W, 3) with a longer side of `SIDE` px at most."""
    import numpy as np
    from PIL import Image

    picture = Image.fromarray(pixels.numpy())
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(picture))
