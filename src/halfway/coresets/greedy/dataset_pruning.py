"""The samples whose removal moves the parameters least, together.

Shape suffixes: n samples of a class, C classes, E = D + 1 features and a one, P projections.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import Greedy, Picked
from ..budgets import Group
from ..evidence import Evidence
from ..last_layer import Curvature, factors

_TRIED = 64  # removed samples that are looked at in one search for a swap


class DatasetPruning(Greedy):
    """Remove the samples whose influences cancel.

    What: per class, the m samples to remove are those with the smallest norm of sum_i H^-1 g_i: one by one the sample
        that keeps the norm of the sum smallest, then swaps of a removed sample with a retained one while they make it
        smaller. g and H are those of `influence`: the last layer, Kronecker-factored.
    Source: Yang et al., "Dataset Pruning: Reducing Training Data by Examining Generalization Influence", ICLR 2023.
        Theirs is one optimisation for all classes together; here it is greedy with swaps, within each class.
    Cost: a whole training of the network, a forward pass over all samples, and a product of n and P numbers for each
        removed sample.
    Caveats: H^-1 g is projected to 256 random dimensions, by products of random signs for the two factors of g: dot
        products are right on average. Where C (D + 1) is at most that, nothing is projected. What `influence` says
        about H holds here. Only the sum has to be small, so samples with large but opposite influences may go
        together. The last layer's bias counts as one more feature, and logits are taken as that layer gives them: for
        a classifier without bias, or with scaled logits (`speedrun-cifar10`), it is an approximation.

    Args:
        damping: as for `influence`.
        dim: the dimensions that influences are projected to.
        swaps: the most swaps per class.
    """

    name = "dataset_pruning"
    needs = "long run"
    uses = ("features_ND", "logits_NC")

    def __init__(self, damping: float = 0.01, dim: int = 256, swaps: int = 200) -> None:
        if not damping > 0:
            raise ValueError(f"damping must be positive, got {damping}: without it a singular H has no inverse")
        if dim < 1 or swaps < 0:
            raise ValueError(f"dim must be at least 1 and swaps at least 0, got dim={dim}, swaps={swaps}")
        self.damping, self.dim, self.swaps = damping, dim, swaps

    def pick(self, evidence: Evidence, parts: list[Group], generator: torch.Generator) -> Picked:
        assert evidence.features_ND is not None
        curvature = Curvature(evidence, self.damping)
        project = _Projection(evidence.num_classes, evidence.features_ND.shape[1] + 1, self.dim, generator)
        found = []
        for group in parts:
            # Of equal samples the first is removed, so they come in random order.
            ids = group.ids[torch.randperm(len(group.ids), generator=generator)]
            influences_nP = project(*curvature.solve(*factors(evidence, ids)))
            removed_n = remove(influences_nP, len(ids) - group.budget)
            removed_n = swap(influences_nP, removed_n, self.swaps)
            found.append(ids[~removed_n])
        return Picked(torch.cat(found))


class _Projection:
    """Outer products of an (n, C) and an (n, E) as (n, P) float64, without ever holding C E numbers per sample."""

    def __init__(self, classes: int, width: int, dim: int, generator: torch.Generator) -> None:
        self._exact = classes * width <= dim
        self._CP, self._EP = (
            torch.randint(2, (size, dim), generator=generator, dtype=torch.float32) * 2 - 1 for size in (classes, width)
        )

    def __call__(self, left_nC: Tensor, right_nE: Tensor) -> Tensor:
        if self._exact:
            return (left_nC.double().unsqueeze(2) * right_nE.double().unsqueeze(1)).flatten(1)
        products_nP = (left_nC @ self._CP.to(left_nC.dtype)).double() * (right_nE @ self._EP.to(right_nE.dtype))
        return products_nP / self._CP.shape[1] ** 0.5


def remove(influences_nP: Tensor, count: int) -> Tensor:
    """(n,) bool, `count` of them True: one by one, the row that keeps the norm of the sum smallest."""
    squares_n = influences_nP.square().sum(1)
    removed_n = torch.zeros(len(squares_n), dtype=torch.bool)
    sum_P = torch.zeros(influences_nP.shape[1], dtype=influences_nP.dtype)
    for _ in range(count):
        row = int((squares_n + 2 * (influences_nP @ sum_P)).masked_fill_(removed_n, torch.inf).argmin())
        removed_n[row] = True
        sum_P += influences_nP[row]
    return removed_n


def swap(influences_nP: Tensor, removed_n: Tensor, most: int) -> Tensor:
    """Exchange a removed row for another as long as that makes the norm of the removed rows' sum smaller.

    Of the removed rows, those are tried without which the norm is smallest, each with every other row.
    """
    removed_n = removed_n.clone()
    squares_n = influences_nP.square().sum(1)
    for _ in range(most if 0 < int(removed_n.sum()) < len(removed_n) else 0):
        inside, outside = removed_n.nonzero().squeeze(1), (~removed_n).nonzero().squeeze(1)
        sum_P = influences_nP[inside].sum(0)
        without = squares_n[inside] - 2 * (influences_nP[inside] @ sum_P)
        tried = inside[without.topk(min(_TRIED, len(inside)), largest=False).indices]
        rest_tP = sum_P - influences_nP[tried]
        after_to = rest_tP.square().sum(1, keepdim=True) + squares_n[outside] + 2 * rest_tP @ influences_nP[outside].T
        best = int(after_to.argmin())
        out, back = outside[best % len(outside)], tried[best // len(outside)]
        # Computed again: differences of large squares may be off by more than is won.
        if not (sum_P - influences_nP[back] + influences_nP[out]).square().sum() < sum_P.square().sum():
            break
        removed_n[back], removed_n[out] = False, True
    return removed_n
