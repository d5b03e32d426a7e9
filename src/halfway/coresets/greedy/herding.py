"""Samples whose mean follows the mean of their class.

Shape suffixes: n samples of a class, D features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Greedy, Picked
from ..budgets import Group
from ..evidence import Evidence


class Herding(Greedy):
    """Add, one by one, the sample that brings the mean of the chosen nearest the mean of the class.

    What: per class, with phi the L2-normalised penultimate features, mu their mean and s the sum over the chosen, the
        t-th sample is the argmin over the unchosen of norm(mu - (phi(x) + s) / t).
    Source: Welling, "Herding Dynamical Weights to Learn", ICML 2009; in this form Rebuffi et al., "iCaRL: Incremental
        Classifier and Representation Learning", CVPR 2017.
    Cost: a whole training of the network, a forward pass over all samples, and a product of a class's features with a
        vector for each chosen sample.
    Caveats: it retains typical samples. Public code takes the farthest sample instead of the nearest.
    """

    name = "herding"
    needs = "long run"
    uses = ("features_ND",)

    def pick(self, evidence: Evidence, parts: list[Group], generator: torch.Generator) -> Picked:
        assert evidence.features_ND is not None
        found = []
        for group in parts:
            # Of equal samples the first is taken, so they come in random order.
            ids = group.ids[torch.randperm(len(group.ids), generator=generator)]
            features_nD = F.normalize(evidence.features_ND[ids].to(torch.float32), dim=1)
            found.append(ids[herd(features_nD, group.budget)])
        return Picked(torch.cat(found))


def herd(features_nD: Tensor, count: int) -> Tensor:
    """(count,) rows in the order in which they are chosen."""
    # norm(t mu - s - phi)^2 is smallest where phi . (t mu - s) - norm(phi)^2 / 2 is largest.
    half_n = features_nD.square().sum(1) / 2
    mean_D = features_nD.double().mean(0)
    rest_D = torch.zeros_like(mean_D)
    chosen = torch.empty(count, dtype=torch.int64)
    for t in range(count):
        rest_D += mean_D
        row = int((features_nD @ rest_D.to(features_nD.dtype) - half_n).argmax())
        chosen[t] = row
        rest_D -= features_nD[row]
        half_n[row] = torch.inf
    return chosen
