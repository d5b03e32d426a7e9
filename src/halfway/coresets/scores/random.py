"""A random subset."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import Scored
from ..choosing import tie_breaker
from ..evidence import Evidence


class RandomCoreset(Scored):
    """Retain samples at random, once.

    What: uniform scores; with class balance each class retains the same share.
    Source: the "Random" of every table.
    Cost: nothing.
    Caveats: the rival of all others here, and itself a weak one: a draw per epoch (`RS2`) or per batch costs the same.
        Unlike the sampler `random_subset` it balances classes and is written to a file.
    """

    name = "random_coreset"
    needs = "nothing"
    uses = ()

    def score(self, evidence: Evidence, generator: torch.Generator | None = None) -> Tensor:
        return torch.rand(evidence.num_samples, generator=generator or tie_breaker(0), device="cpu")
