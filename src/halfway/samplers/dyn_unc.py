"""Dyn-Unc: retain the samples whose prediction keeps changing."""

from __future__ import annotations

import warnings
from collections.abc import Sized
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..state.sample_memory import SampleMemory
from .base import Common, Decision, EpochSampler, ids_of_highest

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Columns of the memory: how many losses were seen, the score, and a ring buffer of the last J probabilities.
_SEEN, _SCORE, _RING = 0, 1, 2


class DynUnc(EpochSampler):
    """Dynamic uncertainty: samples that are always right or always wrong teach little.

    What: with P_t the probability of the true class at the t-th visit, u_t is the standard deviation (dividing by
    J - 1) of P_(t-J+1) .. P_t, a window of J visits, and the score is the mean of u over all windows so far, the first
    of which ends at the J-th visit. Every epoch retains the N - round(p N) samples with the highest score. A sample
    with fewer than J visits has no score and counts as the most uncertain; ties are broken at random.

    Source: He et al., "Large-scale Dataset Pruning with Dynamic Uncertainty", CVPR 2024 workshops (arXiv 2306.05175).
    Hyper-parameters: window J = 10 (authors').
    Cost: 4 (J + 2) bytes per sample, a gather and a scatter of B rows per step (and one sum over ranks of as many), a
    sort of N per epoch.

    Deviations:
        - The authors train on everything once, score, and train again on the subset so chosen. Here the scores so far
          decide about the next epoch, and only retained samples get new ones. `Schedule(start=J)` or later makes sure
          that every sample has a score; before that the choice among those without one is random.
        - The authors score images that are not augmented; here P_t comes from the training pass itself, on whatever
          augmentation the sample had at that visit, which adds to its deviation.
        - P_t is taken as exp(-loss), which is exact for cross-entropy. Feed `observe` with the plain one (the recipes
          do): label smoothing by s makes it (1 - s) times that plus s times the mean of -log P over all classes, so
          exp(-loss) stays well below 1 and moves less. Mixed targets, and losses averaged over pixels, have no single
          true class and give a geometric mean of probabilities.
    Caveats: a pruned sample keeps its score until it is chosen again, while those of the others change. In a training
    that visits samples fewer than J times nothing is ever scored, and every epoch is a random subset. A warning says
    so: at construction if the schedule has an end, otherwise in the first epoch that is drawn without a score.
    """

    name = "dyn_unc"
    learns = True
    learns_from = "plain loss"
    memory: SampleMemory

    def __init__(self, data: int | Sized, prune_ratio: float, *, window: int = 10, **common: Unpack[Common]) -> None:
        if not isinstance(window, int) or window < 2:
            raise ValueError(
                f"window is the number of visits a deviation is taken over, a whole number from 2 on, got {window!r}"
            )
        self.window = window
        super().__init__(data, prune_ratio, **common)
        self.memory = SampleMemory(_RING + window, self.num_samples)
        self._warned_of_window = False
        if self.schedule.stop is not None:
            self.foresee(self.schedule.stop)

    def foresee(self, epochs: int) -> None:
        start, stop = self.schedule.start, min(epochs, self.schedule.stop or epochs)
        # The last decision is made before epoch stop - 1. Until the window begins every epoch visits every sample.
        visits = min(start, stop - 1) + max(0, stop - 1 - start) * (1 - self.prune_ratio)
        if start < stop and self.prune_ratio > 0 and visits < self.window:
            self._warn_of_window(
                f"a sample is visited about {visits:.3g} times before the last decision, in epoch {stop - 1}, and a "
                f"score takes {self.window} visits"
            )

    def _warn_of_window(self, why: str) -> None:
        if self._warned_of_window:
            return
        self._warned_of_window = True
        warnings.warn(
            f"dyn_unc: {why}; samples without a score are drawn at random, so that this is (nearly) a random subset "
            "per epoch. Take a smaller window=, or begin to prune later: Schedule(start=window)",
            stacklevel=5,
        )

    def learn(self, ids: Tensor, losses: Tensor) -> None:
        old_BW = self.memory.read(ids, losses.device)
        seen = old_BW[:, _SEEN].nan_to_num(0.0)
        place = (seen % self.window).to(torch.int64)
        ring_BJ = old_BW[:, _RING:].scatter(1, place.unsqueeze(1), losses.neg().exp().unsqueeze(1))
        windows = (seen + 2 - self.window).clamp(min=0)
        before = old_BW[:, _SCORE].nan_to_num(0.0)
        # NaN (unknown) until the ring is full.
        score = before + (ring_BJ.std(1) - before) / windows
        new_BW = torch.cat([(seen + 1).unsqueeze(1), score.unsqueeze(1), ring_BJ], 1)
        # A loss that is not finite must not stay in the ring: the sample starts again from zero visits.
        new_BW = torch.where(losses.isfinite().unsqueeze(1), new_BW, float("nan"))
        self.memory.write(ids, new_BW, self.ranks)

    def decide(self, epoch: int, generator: torch.Generator) -> Decision:
        score_N = self.memory.values[:, _SCORE].cpu()
        if score_N.isnan().all():
            self._warn_of_window(f"in epoch {epoch} no sample has the {self.window} visits that a score takes")
        return Decision(ids_of_highest(score_N, self.retained_count, generator))
