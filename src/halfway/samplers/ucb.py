"""UCB: retain the samples that are hard, or may be."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .base import Common, ids_of_highest
from .moving_average import MovingAverage

if TYPE_CHECKING:
    from typing_extensions import Unpack


class UCB(MovingAverage):
    """Upper confidence bound: ranks samples by how high their score may be.

    What: every `period` epochs retains the N - round(p N) samples with the highest m + c v, where m and v are moving
    mean and variance of the sample's score (`MovingAverage` has the formulas). Samples without a score come first, ties
    are broken at random.

    Source: Raju, Daruwalla and Lipasti, "Accelerating Deep Learning with Dynamic Data Pruning", arXiv 2111.12621, 2021.
    Hyper-parameters: alpha = 0.8, c = 1, period = 10 epochs. These are our defaults; c depends on the scale of the
    losses, since v is a variance and m is not.
    Cost: 8 bytes per sample, a gather and a scatter of B rows per step (and one small sum over ranks), a sort of N
    every `period` epochs.

    Deviations:
        - The authors score how uncertain the prediction is. Here the score is whatever `observe` reports: the loss,
          because it is free.
        - Scores come from training itself; no extra pass over the data updates those of pruned samples, so a pruned
          sample keeps its score until others fall below it.
        - The averages start at the first score; a public re-implementation starts them at zero. Like that one, we have
          the variance itself in the bound, not its root.
    Caveats: prefers high losses, which is harmful with noisy labels. Without epochs of full data first
    (`Schedule(start)`) the first subset is random, and stays for a whole period.
    """

    name = "ucb"

    def __init__(
        self,
        data: int | Sized,
        prune_ratio: float,
        *,
        alpha: float = 0.8,
        c: float = 1.0,
        period: int = 10,
        **common: Unpack[Common],
    ) -> None:
        if not 0 <= c < float("inf"):
            raise ValueError(f"c is the weight of the variance and must be at least 0, got {c}")
        self.c = c
        super().__init__(data, prune_ratio, alpha=alpha, period=period, **common)

    def choose(self, mean_N: Tensor, variance_N: Tensor, generator: torch.Generator) -> Tensor:
        return ids_of_highest(mean_N + self.c * variance_N, self.retained_count, generator)
