"""UCB: retain the samples that are hard, or of which one cannot be sure."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .base import Common, highest
from .moving_average import MovingAverage

if TYPE_CHECKING:
    from typing_extensions import Unpack


class UCB(MovingAverage):
    """Upper confidence bound: an optimist's ranking.

    What: every `period` epochs retains the N - round(p N) samples with the highest m + c v, where m and v are moving
    mean and variance of the sample's score (`MovingAverage` has the formulas). Samples without a score come first,
    equal ones fall at random.

    Source: Raju, Daruwalla and Lipasti, "Accelerating Deep Learning with Dynamic Data Pruning", arXiv 2111.12621, 2021.
    Hyper-parameters: alpha = 0.8, c = 1, period = 10 epochs. These are our defaults; c goes with the scale of the
    losses, since v is a variance and m is not.
    Cost: 8 bytes per sample, a gather and a scatter of B rows per step (and one small sum over ranks), a sort of N
    every `period` epochs.

    Deviations:
        - The authors score how uncertain the prediction is. Here the score is whatever `observe` is fed with, which is
          the loss, because it comes for free.
        - Scores are those of training itself; no extra pass over the data refreshes the pruned samples', so a pruned
          sample stays as it was last seen until others fall below it.
        - The averages start at the first score, where a public re-implementation starts them at zero. That has the
          variance itself, without a root, in the bound, and so have we.
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
        return highest(mean_N + self.c * variance_N, self.retained_count, generator)
