"""How far the last layer would move without the sample."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import Scored
from ..evidence import Evidence
from ..last_layer import Curvature, blocks, factors


class Influence(Scored):
    """Retain the samples with the largest influence on the parameters of the last layer.

    What: norm of H^-1 g, with g the gradient of the sample's cross-entropy for the last linear layer and H the
        Gauss-Newton matrix of that layer over all samples, Kronecker-factored: H = (B + b I) x (A + a I), with B the
        mean of diag(p) - p p^T, A the mean of phi~ phi~^T and phi~ = [phi, 1]. The largest are retained.
    Source: influence functions: Koh & Liang, "Understanding Black-box Predictions via Influence Functions", ICML 2017;
        the factors: Martens & Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature", ICML
        2015.
    Cost: a whole training of the network, a forward pass over all samples, and two products of features with a matrix
        of (D + 1)^2 numbers.
    Caveats: of the last layer only. The product of the means is the mean of the products only where p and phi are
        uncorrelated; a trained network's are correlated, so H is an approximation. Where p is nearly certain for all
        samples, damping decides. Wrong labels are retained first. The last layer's bias counts as one more feature,
        and logits are taken as that layer gives them: for a classifier without bias, or with scaled logits
        (`speedrun-cifar10`), it is an approximation.

    Args:
        damping: added to the diagonals of A and B, relative to their mean eigenvalue. The default is ours.
    """

    name = "influence"
    needs = "long run"
    uses = ("features_ND", "logits_NC")

    def __init__(self, damping: float = 0.01) -> None:
        if not damping > 0:
            raise ValueError(f"damping must be positive, got {damping}: without it a singular H has no inverse")
        self.damping = damping

    def score(self, evidence: Evidence, generator: torch.Generator | None = None) -> Tensor:
        evidence.require(self.uses, self.name)
        curvature = Curvature(evidence, self.damping)
        found = []
        for ids in blocks(evidence.num_samples):
            errors_nC, features_nE = curvature.solve(*factors(evidence, ids))
            found.append(errors_nC.norm(dim=1) * features_nE.norm(dim=1))
        return torch.cat(found)
