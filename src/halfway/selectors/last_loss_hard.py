"""Retains the samples with the largest last known losses. Decided before the model runs, at no cost."""

from __future__ import annotations

from torch import Tensor

from .base import Candidates, Ranking
from .tools.draw import without_ties
from .tools.last_losses import LastLosses, known_or_mean


class LastLossHard(Ranking):
    """Retains the samples whose loss was largest when they were last trained on.

    What: the S largest last losses stay. A sample without a known loss counts as average; ties are broken at random.
    Source: Loshchilov & Hutter, "Online Batch Selection for Faster Training of Neural Networks", 2016, who rank all
        samples of the data set by it, and draw by rank.
    Cost: 1 - p, nothing is run on pruned samples. 4 bytes per sample of the data set, and `blocker.observe(losses)`.
    Caveats: prefers outliers and wrong labels. A pruned sample keeps its old loss, so an easy one may never return.

    Args:
        num_samples: size of the data set, see `SampleMemory`.
    """

    name = "last_loss_hard"
    wants_ids = "required"
    wants_losses = "required"

    def __init__(self, num_samples: int | None = None) -> None:
        self._losses = self.remember("losses", LastLosses(num_samples))

    def importance(self, candidates: Candidates) -> Tensor:
        losses_B, _, _ = known_or_mean(self._losses.of(candidates))
        return without_ties(losses_B, candidates.generator)

    def observe(self, candidates: Candidates, retained: Tensor | None, losses: Tensor) -> None:
        self._losses.observe(candidates, retained, losses)
