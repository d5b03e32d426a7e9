"""The norm of each sample's gradient, early in training."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import Scored
from ..evidence import Evidence


class GraNd(Scored):
    """Retain the samples with the largest gradients early in training.

    What: the norm of the gradient of a sample's cross-entropy for all parameters, mean over K = 10 trainings with
        different seeds, each at a tenth of a training. The largest are retained.
    Source: Paul et al., "Deep Learning on a Data Diet: Finding Important Examples Early in Training", NeurIPS 2021.
    Cost: K trainings of a tenth of the length, and K times a forward and backward pass of every sample by itself, whose
        gradient takes as much memory as the network.
    Caveats: not at initialisation, where the first results did not reproduce (Kirsch 2023), and not after the whole
        training, as some public code has it. In eval mode: in training mode BatchNorm gives no sample
        a gradient of its own. Wrong labels have the largest gradients.
    """

    name = "grand"
    needs = "short runs"
    uses = ("gradient_norms",)

    def score(self, evidence: Evidence, generator: torch.Generator | None = None) -> Tensor:
        evidence.require(self.uses, self.name)
        return torch.stack(evidence.short("gradient_norms")).mean(0)


class GraNdLast(Scored):
    """GraNd of the last layer alone, which needs no backward pass.

    What: norm(p - y) sqrt(1 + norm(phi)^2), with p the softmax, y the one-hot label and phi the input of the last
        linear layer: the norm of the gradient for its weight and bias. Mean over K = 10 trainings, as for GraNd.
    Source: the gradient is that of Katharopoulos & Fleuret, ICML 2018, and common in public code; the mean over short
        trainings is that of GraNd.
    Cost: as EL2N.
    Caveats: another ranking than GraNd; for a last layer without bias the 1 under the root is too much.
    """

    name = "grand_last"
    needs = "short runs"
    uses = ("error_norms", "feature_norms")

    def score(self, evidence: Evidence, generator: torch.Generator | None = None) -> Tensor:
        evidence.require(self.uses, self.name)
        errors_KN = torch.stack(evidence.short("error_norms"))
        features_KN = torch.stack(evidence.short("feature_norms"))
        return (errors_KN * (1 + features_KN.square()).sqrt()).mean(0)
