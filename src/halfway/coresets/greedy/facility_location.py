"""Facility location: medoids, one by one.

Shape suffixes: n samples, m chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

_AT_ONCE = 32  # bounds that are renewed together: one small matrix instead of many vectors


def lazy_greedy(similarity_nn: Tensor, count: int) -> Tensor:
    """(m,) rows in the order in which they are chosen: each adds most to F(S) = sum_i max_(j in S) s_ij.

    F is submodular: what a row adds only shrinks as others are chosen, so what it added earlier is an upper bound, and
    only rows whose bound is among the largest are looked at again. The choice is that of the plain greedy algorithm,
    and F at least 1 - 1/e of the best possible (Minoux 1978; Nemhauser et al. 1978). Of equal rows the first is chosen.

    Args:
        similarity_nn: s, symmetric and not negative.
    """
    size = len(similarity_nn)
    bounds_n = similarity_nn.sum(1)
    taken_n = torch.zeros(size, dtype=torch.bool)
    fresh_n = ~taken_n
    covered_n = similarity_nn.new_zeros(size)
    chosen = torch.empty(count, dtype=torch.int64)
    for t in range(count):
        row = int(bounds_n.argmax())
        while not fresh_n[row]:
            stale = bounds_n.masked_fill(fresh_n, -torch.inf).topk(min(_AT_ONCE, size)).indices
            stale = stale[~fresh_n[stale]]
            bounds_n[stale] = (similarity_nn[stale] - covered_n).clamp_min_(0).sum(1)
            fresh_n[stale] = True
            row = int(bounds_n.argmax())
        chosen[t] = row
        covered_n = torch.maximum(covered_n, similarity_nn[row])
        bounds_n[row] = -torch.inf
        taken_n[row] = True
        fresh_n.copy_(taken_n)  # what is chosen is never looked at again
    return chosen


def cluster_sizes(similarity_nn: Tensor, chosen_m: Tensor) -> Tensor:
    """(m,) how many rows are most similar to each chosen one, itself included."""
    nearest_n = similarity_nn[:, chosen_m].argmax(1)
    nearest_n[chosen_m] = torch.arange(len(chosen_m))
    return torch.bincount(nearest_n, minlength=len(chosen_m))
