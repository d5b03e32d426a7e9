"""Moving averages of each sample's score, and a new subset every few epochs: what the methods of Raju et al. share."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..state.sample_memory import SampleMemory
from .base import Common, Decision, EpochSampler

if TYPE_CHECKING:
    from typing_extensions import Unpack


class MovingAverage(EpochSampler):
    """Base class. A subclass sets `name` and implements `choose`.

    The first score s of a sample sets its mean m = s and its variance v = 0. Each further one, with d = s - m:

        v <- (1 - alpha) v + alpha d^2,    m <- m + alpha d

    Args:
        alpha: weight of the newest score, in (0, 1].
        period: epochs until a new subset is chosen. The first of the pruning window begins the first period.
    """

    learns = True
    memory: SampleMemory

    def __init__(
        self,
        data: int | Sized,
        prune_ratio: float,
        *,
        alpha: float = 0.8,
        period: int = 10,
        **common: Unpack[Common],
    ) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha is the weight of the newest loss and must be in (0, 1], got {alpha}")
        if not isinstance(period, int) or period < 1:
            raise ValueError(f"period is in epochs and must be a whole number from 1 on, got {period!r}")
        self.alpha = alpha
        self.period = period
        super().__init__(data, prune_ratio, **common)
        self.memory = SampleMemory(2, self.num_samples)

    def choose(self, mean_N: Tensor, variance_N: Tensor, generator: torch.Generator) -> Tensor:
        """The (M,) sorted ids to retain, given means and variances (N,), NaN where nothing is known."""
        raise NotImplementedError

    def learn(self, ids: Tensor, losses: Tensor) -> None:
        old_B2 = self.memory.read(ids, losses.device)
        first = old_B2.isnan().any(1)
        mean, variance = torch.where(first, losses, old_B2[:, 0]), torch.where(first, 0.0, old_B2[:, 1])
        surprise = losses - mean
        variance = (1 - self.alpha) * variance + self.alpha * surprise.square()
        mean = mean + self.alpha * surprise
        self.memory.write(ids, torch.stack([mean, variance], 1), self.ranks)

    def decide(self, epoch: int, generator: torch.Generator) -> Decision:
        if self.continues(epoch, self.period):
            return Decision(self.retained)
        mean_N, variance_N = self.memory.values.cpu().unbind(1)
        return Decision(self.choose(mean_N, variance_N, generator))
