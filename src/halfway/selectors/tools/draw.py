"""Drawing samples without replacement, as pure functions: nothing waits for the device, no shape depends on data.

Shape suffixes: B candidates, S drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor


def inclusion_probabilities(weights_B: Tensor, count: int, smallest: float = 1e-6) -> Tensor:
    """(B,) float64 in (0, 1] that add up to `count`, proportional to the weights as far as 1 allows.

    Args:
        weights_B: (B,), not negative.
        smallest: weights below this share of their mean are raised to it, so that every sample can be drawn. With 0 a
            sample of weight 0 is drawn only if there are not enough others.
    """
    weights = weights_B.to(torch.float64)
    weights = weights.clamp_min(smallest * weights.mean()) + torch.finfo(torch.float64).tiny
    # From the largest on: a sample whose share of what is left is at least 1 gets 1; the rest is left to the others.
    ordered, order = weights.sort(descending=True)
    rest = ordered.flip(0).cumsum(0).flip(0)
    left = count - torch.arange(len(ordered), device=ordered.device, dtype=torch.float64)
    certain = ordered * left >= rest
    first = certain.sum().clamp_max(len(ordered) - 1).reshape(1)
    shared = ordered * (left / rest).index_select(0, first)
    return torch.zeros_like(ordered).scatter(0, order, torch.where(certain, 1.0, shared).clamp_max(1.0))


def systematic(probabilities_B: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(S,) sorted rows such that each is drawn with exactly its probability (which add up to `count`).

    Systematic sampling (Madow 1949) in random order: the samples lie on a line, each as long as its probability, and
    every point u, u + 1, u + 2, ... picks the sample it falls on.
    """
    device = probabilities_B.device
    order = torch.randperm(len(probabilities_B), generator=generator, device=device)
    ends = probabilities_B.to(torch.float64)[order].cumsum(0)
    # The line ends at `count` up to rounding; exactly `count` points must fall on it.
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


def without_ties(values_B: Tensor, generator: torch.Generator) -> Tensor:
    """(B,) float64: float32 values in the same order, with ties (also at 0) broken at random."""
    u_B = torch.rand(len(values_B), generator=generator, device=values_B.device, dtype=torch.float64)
    values_B = values_B.to(torch.float64)
    # Less than the distance between any two float32 numbers, the smallest ones included.
    return values_B + (1e-9 * values_B.abs() + 1e-46) * u_B
