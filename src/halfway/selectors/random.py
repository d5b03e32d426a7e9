"""Random per batch: the cheapest rival, and a hard one. Nothing is probed; the model never sees pruned samples."""

from __future__ import annotations

from .base import Candidates, Selection, Selector, random_rows


class Random(Selector):
    """Retains samples drawn uniformly at every step ("Repeated Sampling of Random Subsets", Okanovic et al.)."""

    name = "random"

    def select(self, candidates: Candidates, count: int) -> Selection:
        return random_rows(candidates, count)
