"""Neither the typical nor the odd: samples at the median distance from their class's centre."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import Scored
from ..evidence import Evidence


class Moderate(Scored):
    """Retain the samples whose distance to the centre of their class is nearest the median one.

    What: the centre of a class is the median of its penultimate features, coordinate by coordinate; d is the distance
        to it, and the samples with the smallest |d - median of d over the class| are retained.
    Source: Xia et al., "Moderate Coreset: A Universal Method of Data Selection for Real-world Data-efficient Deep
        Learning", ICLR 2023. Their text takes the mean of a class as its centre, their code the median. They sort all
        classes together and retain the middle; here the median distance is that of each class.
    Cost: a whole training of the network, a forward pass over all samples, and a sort of each feature.
    Caveats: for an even number of samples the lower of the two middle ones is the median.
    """

    name = "moderate"
    needs = "long run"
    uses = ("features_ND",)

    def score(self, evidence: Evidence, generator: torch.Generator | None = None) -> Tensor:
        evidence.require(self.uses, self.name)
        assert evidence.features_ND is not None
        scores_N = torch.empty(evidence.num_samples)
        for label in evidence.labels_N.unique().tolist():
            ids = (evidence.labels_N == label).nonzero().squeeze(1)
            features_nD = evidence.features_ND[ids].to(torch.float32)
            d_n = (features_nD - features_nD.median(0).values).norm(dim=1)
            scores_N[ids] = -(d_n - d_n.median()).abs()
        return scores_N
