"""Random per batch: the cheapest rival, and a hard one. Nothing is probed; the model never sees pruned samples."""

from __future__ import annotations

from .base import Candidates, Selection, Selector, random_rows


class Random(Selector):
    """Retains samples drawn uniformly at every step.

    What: S of N without replacement, independently in each step, so that every sample stays with probability 1 - p and
        all of them are seen in the course of the epochs. The mean loss of the retained is an unbiased estimate of that
        of the batch.
    Source: Okanovic et al., "Repeated Sampling of Random Subsets", 2023; Raju et al. 2021 found it hard to beat, too.
    Cost: 1 - p, nothing is run on pruned samples.
    Caveats: as with all pruning, gradients of smaller batches are noisier.
    """

    name = "random"

    def select(self, candidates: Candidates, count: int) -> Selection:
        return random_rows(candidates, count)
