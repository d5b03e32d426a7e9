"""Samplers by name: they decide before the epoch. A new one is a file beside this one and an entry in `SAMPLERS`.

Begin with `base`, then read `rs2`, the simplest. They need no blocker and no engine.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from .base import Decision, EpochSampler
from .dyn_unc import DynUnc
from .epsilon_greedy import EpsilonGreedy
from .infobatch import InfoBatch
from .random_subset import RandomSubset
from .rs2 import RS2
from .ucb import UCB
from .weights import Index, WithWeights

SAMPLERS: dict[str, type[EpochSampler]] = {
    s.name: s for s in (InfoBatch, UCB, EpsilonGreedy, DynUnc, RS2, RandomSubset)
}


def make(name: str, num_samples: int | Sized, prune_ratio: float, **options: Any) -> EpochSampler:
    """A sampler from its name; options are those of its class."""
    if name not in SAMPLERS:
        raise ValueError(f"unknown sampler {name!r}; choose one of {sorted(SAMPLERS)}")
    return SAMPLERS[name](num_samples, prune_ratio, **options)


__all__ = [
    "RS2",
    "SAMPLERS",
    "UCB",
    "Decision",
    "DynUnc",
    "EpochSampler",
    "EpsilonGreedy",
    "Index",
    "InfoBatch",
    "RandomSubset",
    "WithWeights",
    "make",
]
