"""Epsilon-greedy: retain the hard samples, and some others at random."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .base import Common, ids_of_highest
from .moving_average import MovingAverage

if TYPE_CHECKING:
    from typing_extensions import Unpack


class EpsilonGreedy(MovingAverage):
    """Retains mostly the samples with the highest scores, and explores with the rest.

    What: every `period` epochs retains M = N - round(p N) samples. M - round(epsilon M) of them are those with the
    highest moving mean m of their score (`MovingAverage` has the formula); samples without a score come first, ties are
    broken at random. The other round(epsilon M) are drawn uniformly from those that are left.

    Source: Raju, Daruwalla and Lipasti, "Accelerating Deep Learning with Dynamic Data Pruning", arXiv 2111.12621, 2021.
    Hyper-parameters: epsilon = 0.1, alpha = 0.8, period = 10 epochs. These are our defaults.
    Cost: 8 bytes per sample, a gather and a scatter of B rows per step (and one small sum over ranks), a sort of N
    every `period` epochs.

    Deviations: those of `UCB`.
    Caveats: those of `UCB`.
    """

    name = "epsilon_greedy"

    def __init__(
        self,
        data: int | Sized,
        prune_ratio: float,
        *,
        epsilon: float = 0.1,
        alpha: float = 0.8,
        period: int = 10,
        **common: Unpack[Common],
    ) -> None:
        if not 0 <= epsilon <= 1:
            raise ValueError(f"epsilon is the share of retained samples drawn at random, in [0, 1], got {epsilon}")
        self.epsilon = epsilon
        super().__init__(data, prune_ratio, alpha=alpha, period=period, **common)

    def choose(self, mean_N: Tensor, variance_N: Tensor, generator: torch.Generator) -> Tensor:
        by_chance = round(self.epsilon * self.retained_count)
        retained_N = torch.zeros(self.num_samples, dtype=torch.bool, device="cpu")
        retained_N[ids_of_highest(mean_N, self.retained_count - by_chance, generator)] = True
        left = retained_N.logical_not().nonzero().squeeze(1)
        order = torch.randperm(len(left), generator=generator, device="cpu")
        retained_N[left[order[:by_chance]]] = True
        return retained_N.nonzero().squeeze(1)
