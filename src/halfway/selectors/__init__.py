"""Selectors by name. A new one is a file beside this one and a line in `SELECTORS`."""

from __future__ import annotations

from .base import Candidates, Selection, Selector
from .density import Density
from .loss import Loss
from .random import Random

SELECTORS: dict[str, type[Selector]] = {s.name: s for s in (Density, Loss, Random)}


def make(selector: str | Selector) -> Selector:
    """A selector from its name (with default settings), or the selector itself."""
    if isinstance(selector, Selector):
        return selector
    if selector in SELECTORS:
        return SELECTORS[selector]()
    raise ValueError(f"unknown selector {selector!r}; choose one of {sorted(SELECTORS)} or pass a Selector")


__all__ = ["SELECTORS", "Candidates", "Density", "Loss", "Random", "Selection", "Selector", "make"]
