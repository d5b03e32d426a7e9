"""Drawing samples without replacement, as pure functions: nothing waits for the device, no shape depends on data.

Shape suffixes: B candidates, S drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rounds in which probabilities that would exceed 1 are capped and the others raised. Each caps at least one more
# sample if any is left; after a few nothing changes any more for weights one meets in practice.
_CAPS = 8


def inclusion_probabilities(weights_B: Tensor, count: int) -> Tensor:
    """(B,) float64 in (0, 1] that add up to `count`, proportional to the weights as far as 1 allows.

    Args:
        weights_B: (B,), not negative. Zeros are raised to a tiny value: everybody can be drawn.
    """
    weights = weights_B.to(torch.float64)
    weights = weights.clamp_min(1e-6 * weights.mean()) + torch.finfo(torch.float64).tiny
    probabilities = weights * count / weights.sum()
    for _ in range(_CAPS):
        capped = probabilities >= 1
        free = torch.where(capped, 0.0, probabilities)
        # What is left for those below 1; `clamp_min` only matters when nobody is.
        scale = (count - capped.sum()) / free.sum().clamp_min(torch.finfo(torch.float64).tiny)
        probabilities = torch.where(capped, 1.0, (free * scale))
    return probabilities.clamp_max(1.0)


def systematic(probabilities_B: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(S,) sorted rows such that each is drawn with exactly its probability (which add up to `count`).

    Systematic sampling (Madow 1949) in random order: the samples lie on a line, each as long as its probability, and
    every point u, u + 1, u + 2, ... picks the sample it falls on.
    """
    device = probabilities_B.device
    order = torch.randperm(len(probabilities_B), generator=generator, device=device)
    ends = probabilities_B.to(torch.float64)[order].cumsum(0)
    # The last end is `count` but for rounding; exactly `count` points must fall on the line.
    ends = ends * (count / ends[-1])
    start = torch.rand((), generator=generator, device=device, dtype=torch.float64)
    points = start + torch.arange(count, device=device, dtype=torch.float64)
    hits = torch.searchsorted(ends, points, right=True).clamp_max(len(order) - 1)
    return order[hits].sort().values


def gumbel(scores_B: Tensor, generator: torch.Generator) -> Tensor:
    """(B,) scores plus Gumbel noise: the largest ones are a draw without replacement, one after the other, with
    probabilities proportional to exp(score) (Plackett-Luce; Yellott 1977)."""
    uniform = torch.rand(len(scores_B), generator=generator, device=scores_B.device, dtype=torch.float64)
    smallest = torch.finfo(torch.float64).tiny
    return scores_B.to(torch.float64) - (-(uniform.clamp_min(smallest).log())).clamp_min(smallest).log()
