"""A random subset, drawn once."""

from __future__ import annotations

import torch

from ..seeds import seed_of
from .base import Decision, EpochSampler


class RandomSubset(EpochSampler):
    """Trains on a fixed random part of the data.

    What: the same N - round(p N) samples in every pruned epoch, drawn uniformly; a function of the seed alone.

    Source: the "Random" of the PFB paper's tables and of most others'.
    Hyper-parameters: none.
    Cost: nothing per step, a permutation of N per epoch.
    Caveats: the weakest rival. A random subset that changes (`RS2`, or per batch `ForwardBlocker(selector="random")`)
    costs the same and is better; beating only this one shows little.
    """

    name = "random_subset"

    def decide(self, epoch: int, generator: torch.Generator) -> Decision:
        once = torch.Generator("cpu").manual_seed(seed_of(self.seed, 0, 2))
        order = torch.randperm(self.num_samples, generator=once, device="cpu")
        return Decision(order[: self.retained_count].sort().values)
