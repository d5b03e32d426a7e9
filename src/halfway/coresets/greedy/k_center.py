"""Samples that leave no other one far away.

Shape suffixes: n samples of a class, D features.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Greedy, Picked
from ..budgets import Group
from ..evidence import Evidence

Start = Literal["random", "medoid"]
_BLOCK = 1024


class KCenter(Greedy):
    """Add, one by one, the sample that is farthest from all that are chosen.

    What: per class, on L2-normalised penultimate features with the Euclidean distance: the first centre is drawn or the
        medoid, and counts; then the argmax of the distance to the nearest centre, a running minimum. The largest such
        distance that is left is at most twice the smallest possible.
    Source: Sener & Savarese, "Active Learning for Convolutional Neural Networks: A Core-Set Approach", ICLR 2018; the
        bound: Gonzalez 1985.
    Cost: a whole training of the network, a forward pass over all samples, and a product of a class's features with a
        vector for each chosen sample. The medoid: all distances within a class, in blocks.
    Caveats: outliers are chosen first.

    Args:
        start: "random" (default) or "medoid", the sample with the smallest sum of distances to its class.
    """

    name = "k_center"
    needs = "long run"
    uses = ("features_ND",)

    def __init__(self, start: Start = "random") -> None:
        if start not in get_args(Start):
            raise ValueError(f"unknown start {start!r}; choose one of {get_args(Start)}")
        self.start = start

    def pick(self, evidence: Evidence, parts: list[Group], generator: torch.Generator) -> Picked:
        assert evidence.features_ND is not None
        found = []
        for group in parts:
            # Of equal samples the first is taken, so they come in random order; so the first is a random one.
            ids = group.ids[torch.randperm(len(group.ids), generator=generator)]
            features_nD = F.normalize(evidence.features_ND[ids].to(torch.float32), dim=1)
            first = medoid(features_nD) if self.start == "medoid" else 0
            found.append(ids[farthest_first(features_nD, group.budget, first)])
        return Picked(torch.cat(found))


def farthest_first(features_nD: Tensor, count: int, first: int) -> Tensor:
    """(count,) rows in the order in which they are chosen; `first` is one of them."""
    squares_n = features_nD.square().sum(1)
    nearest_n = torch.full_like(squares_n, torch.inf)
    chosen = torch.empty(count, dtype=torch.int64)
    row = first
    for t in range(count):
        chosen[t] = row
        distances_n = squares_n + squares_n[row] - 2 * (features_nD @ features_nD[row])
        nearest_n = torch.minimum(nearest_n, distances_n)
        nearest_n[row] = -torch.inf
        row = int(nearest_n.argmax())
    return chosen


def medoid(features_nD: Tensor) -> int:
    """The row with the smallest sum of distances to all others."""
    sums = [torch.cdist(block, features_nD).sum(1) for block in features_nD.split(_BLOCK)]
    return int(torch.cat(sums).argmin())
