"""Largest training loss first."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .base import Candidates
from .outputs import OutputRanking
from .tools.draw import gumbel
from .tools.losses import LossFunction

Sampling = Literal["top", "rank"]


class Loss(OutputRanking):
    """Ordered SGD: train on the samples of the batch with the largest loss.

    What: "top" retains the S largest losses (the mean of them is Ordered SGD's objective). "rank" draws without
        replacement, by rank: p_i proportional to exp(-log(pressure) i / B) for the i-th largest loss, i = 0 .. B - 1,
        so that the largest is `pressure` times as likely as the smallest.
    Source: Kawaguchi & Lu, "Ordered SGD", AISTATS 2020; Loshchilov & Hutter, "Online Batch Selection for Faster
        Training of Neural Networks", ICLR workshop 2016 (theirs ranks the whole data set by last known losses).
    Cost: the forward pass of all samples, see `selectors/outputs.py`.
    Caveats: prefers outliers and wrong labels; the mean of the retained losses is not that of the batch.

    Args:
        sampling: "top" (default) or "rank".
        pressure: of "rank", at least 1; 100 is Loshchilov & Hutter's.
        loss_fn, target: see `OutputRanking`.
    """

    name = "loss"

    def __init__(
        self,
        sampling: Sampling = "top",
        pressure: float = 100.0,
        loss_fn: LossFunction | None = None,
        target: int | str | None = None,
    ) -> None:
        super().__init__(loss_fn, target)
        if sampling not in get_args(Sampling):
            raise ValueError(f"unknown sampling {sampling!r}; choose one of {get_args(Sampling)}")
        if not pressure >= 1:
            raise ValueError(f"pressure is how much likelier the largest loss is, at least 1, got {pressure}")
        self.sampling = sampling
        self.pressure = pressure

    def importance(self, candidates: Candidates) -> Tensor:
        losses_B = self.losses(candidates)
        if self.sampling == "top":
            return losses_B
        rank_B = losses_B.argsort(descending=True, stable=True).argsort()
        scores_B = -math.log(self.pressure) / candidates.size * rank_B
        # A loss that is not finite must still show.
        return torch.where(losses_B.isfinite(), gumbel(scores_B, candidates.generator), losses_B.to(torch.float64))

    def config(self) -> dict[str, Any]:
        return {**super().config(), "sampling": self.sampling, "pressure": self.pressure}
