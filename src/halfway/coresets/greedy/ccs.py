"""Coverage-centric coresets: a little of every difficulty, without the hardest.

Shape suffixes: N samples, n of a group, K bins.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from ...functional import highest
from ...settings import as_number
from ..base import Greedy, Needs, Picked, Scored
from ..budgets import Group
from ..choosing import checked_scores
from ..evidence import Evidence
from ..scores.aum import AUM
from ..scores.el2n import EL2N
from ..scores.forgetting import Forgetting

By = Literal["aum", "el2n", "forgetting"]
_BY: dict[str, type[Scored]] = {"aum": AUM, "el2n": EL2N, "forgetting": Forgetting}
# The share of the hardest that is cut at each pruning ratio, with the scores of AUM.
BETAS = {
    "cifar10": {0.0: 0.0, 0.3: 0.0, 0.5: 0.0, 0.7: 0.1, 0.8: 0.1, 0.9: 0.3},
    "cifar100": {0.0: 0.0, 0.3: 0.1, 0.5: 0.2, 0.7: 0.2, 0.8: 0.4, 0.9: 0.5},
    "imagenet": {0.0: 0.0, 0.3: 0.0, 0.5: 0.1, 0.7: 0.2, 0.8: 0.2, 0.9: 0.3},
}


class CCS(Greedy):
    """Cut the hardest samples, and spread the budget evenly over the difficulties of the rest.

    What: of each class's samples the round(beta n) hardest are cut. The range of the others' scores is divided into 50
        bins of equal width; bins are served from the smallest to the largest, each with an equal part of the budget
        that is left, or all it has; within a bin the draw is uniform. Hard is a low AUM, a high EL2N, a high number of
        forgettings.
    Source: Zheng et al., "Coverage-centric Coreset Selection for High Pruning Rates", ICLR 2023. They do it with all
        classes together, `class_balance=False`.
    Cost: that of the score it is built on: for AUM and Forgetting a whole training, for EL2N ten short ones.
    Caveats: beta was tuned by its authors for each data set and ratio, on test accuracy. The lists are "cifar10",
        "cifar100" and "imagenet" (`halfway.coresets.greedy.ccs.BETAS`, for AUM), linear between their ratios. Of these
        values we could check against their public commands only CIFAR-10 at a pruning ratio of 0.9 and ImageNet at 0.8
        and 0.9; compare the others with the paper before you rely on them. A sample that was
        never learned counts as forgotten at each presentation, so that the bins stay finite.

    Args:
        by: "aum" (default), "el2n" or "forgetting".
        beta: the share of the hardest to cut, or the name of a list: "cifar10" (default), "cifar100", "imagenet".
        bins: the number of bins.
    """

    name = "ccs"
    needs: Needs = "long run"
    uses: Sequence[str] = ("dynamics",)
    per_class = False

    def __init__(self, by: By = "aum", beta: float | str = "cifar10", bins: int = 50) -> None:
        if by not in get_args(By):
            raise ValueError(f"unknown score {by!r}; choose one of {get_args(By)}")
        share = as_number(beta)
        if beta not in BETAS if share is None else not 0 <= share < 1:
            raise ValueError(f"beta is a share in [0, 1) or the name of a list, one of {list(BETAS)}; got {beta!r}")
        if bins < 1:
            raise ValueError(f"bins must be at least 1, got {bins}")
        self.beta = beta if share is None else float(share)
        self.bins = bins
        self._score = _BY[by]()
        self.needs, self.uses = self._score.needs, self._score.uses

    def check(self, parts: list[Group], class_balance: bool) -> None:
        for group in parts:
            size, cut = len(group.ids), self._cut(group)
            if cut > size - group.budget + 1:
                raise ValueError(
                    f"beta={cut / size:.3g} cuts {cut} of {size} samples, and {group.budget} are to be retained; take "
                    f"a beta of at most 1 - keep, {1 - group.budget / size:.3g}"
                )

    def _cut(self, group: Group) -> int:
        """How many of the hardest."""
        return round(self._beta(1 - group.budget / len(group.ids)) * len(group.ids))

    def pick(self, evidence: Evidence, parts: list[Group], generator: torch.Generator) -> Picked:
        hardness_N = checked_scores(self._score.score(evidence))
        if evidence.dynamics is not None and hardness_N.isinf().any():
            most = evidence.dynamics.presentations_N.max().to(hardness_N)
            hardness_N = torch.where(hardness_N.isinf(), most, hardness_N)
        found = []
        for group in parts:
            left = max(len(group.ids) - self._cut(group), group.budget)
            easier = highest(-hardness_N, group.ids, left, generator)
            found.append(stratified(hardness_N, easier, group.budget, self.bins, generator))
        return Picked(torch.cat(found))

    def _beta(self, prune_ratio: float) -> float:
        if not isinstance(self.beta, str):
            return self.beta
        listed = list(BETAS[self.beta].items())
        for (p, beta), (next_p, next_beta) in itertools.pairwise(listed):
            if prune_ratio <= next_p:
                return beta + (next_beta - beta) * (prune_ratio - p) / (next_p - p)
        return listed[-1][1]


def stratified(scores_N: Tensor, ids: Tensor, count: int, bins: int, generator: torch.Generator) -> Tensor:
    """`count` of the `ids`, spread evenly over `bins` bins of equal width of their scores."""
    scores_n = scores_N[ids].double()
    low, high = scores_n.min(), scores_n.max()
    # The largest score belongs to the last bin. Where all scores are equal there is one bin.
    bin_n = ((scores_n - low) / (high - low).clamp_min(1e-300) * bins).to(torch.int64).clamp(0, bins - 1)
    counts_K = allocate(torch.bincount(bin_n, minlength=bins).tolist(), count)
    shuffled = torch.randperm(len(ids), generator=generator)
    chosen = []
    for k, share in enumerate(counts_K):
        members = shuffled[bin_n[shuffled] == k]
        chosen.append(ids[members[:share]])
    return torch.cat(chosen)


def allocate(sizes: list[int], count: int) -> list[int]:
    """How many each bin gives: the smallest first, each an equal part of what is left, or all it has."""
    given, left = [0] * len(sizes), count
    for served, k in enumerate(sorted(range(len(sizes)), key=lambda k: sizes[k])):
        given[k] = min(sizes[k], left // (len(sizes) - served))
        left -= given[k]
    return given
