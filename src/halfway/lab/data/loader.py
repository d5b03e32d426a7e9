"""Several runs on the same data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import Data, load

if TYPE_CHECKING:
    from ..recipes.schema import Recipe


class Loader:
    """Loads each data set once, not once per run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loaded: dict[Any, Data] = {}

    def __call__(self, recipe: Recipe) -> Data:
        key = (recipe.data, recipe.root)
        if key not in self._loaded:
            self._loaded[key] = load(recipe.data, recipe.root, self._device)
        return self._loaded[key]
