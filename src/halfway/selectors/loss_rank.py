"""Draws samples by the rank of their training loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .base import Candidates, OutputRanking
from .tools.draw import gumbel
from .tools.losses import LossFunction


class LossRank(OutputRanking):
    """Online batch selection: the higher a loss ranks in the batch, the likelier the sample stays.

    What: S are drawn without replacement, by rank: p_i proportional to exp(-log(pressure) i / B) for the i-th largest
        loss, i = 0 .. B - 1, so that the largest is `pressure` times as likely as the smallest.
    Source: Loshchilov & Hutter, "Online Batch Selection for Faster Training of Neural Networks", ICLR workshop 2016.
        They rank the whole data set by last known losses; here the batch is ranked by its current losses.
    Cost: the forward pass of all samples, see `OutputRanking`.
    Caveats: prefers outliers and wrong labels; the mean of the retained losses is not that of the batch.

    Args:
        pressure: at least 1; 100 is Loshchilov & Hutter's.
        loss_fn, target: see `OutputRanking`.
    """

    name = "loss_rank"

    def __init__(
        self, pressure: float = 100.0, loss_fn: LossFunction | None = None, target: int | str | None = None
    ) -> None:
        super().__init__(loss_fn, target)
        if not pressure >= 1:
            raise ValueError(f"pressure is how much likelier the largest loss is, at least 1, got {pressure}")
        self.pressure = pressure

    def importance(self, candidates: Candidates) -> Tensor:
        losses_B = self.losses(candidates)
        rank_B = losses_B.argsort(descending=True, stable=True).argsort()
        scores_B = -math.log(self.pressure) / candidates.size * rank_B
        # A loss that is not finite must stay visible as such.
        return torch.where(losses_B.isfinite(), gumbel(scores_B, candidates.generator), losses_B.to(torch.float64))
