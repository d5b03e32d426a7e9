"""Retains the samples with the largest last known losses. Decided before the model runs, at no cost."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Candidates, Ranking
from .last_loss import known_or_mean
from .tools.last_losses import LastLosses


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
        return _without_ties(losses_B, candidates.generator)

    def observe(self, candidates: Candidates, retained: Tensor | None, losses: Tensor) -> None:
        self._losses.observe(candidates, retained, losses)


def _without_ties(losses_B: Tensor, generator: torch.Generator) -> Tensor:
    """(B,) float64: float32 losses in the same order, with ties (also at 0) broken at random."""
    u_B = torch.rand(len(losses_B), generator=generator, device=losses_B.device, dtype=torch.float64)
    losses_B = losses_B.to(torch.float64)
    # Less than the distance between any two float32 numbers, the smallest ones included.
    return losses_B + (1e-9 * losses_B.abs() + 1e-46) * u_B
