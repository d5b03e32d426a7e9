"""The norm of the error, early in training."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import Scored
from ..evidence import Evidence


class EL2N(Scored):
    """Retain the samples with the largest errors early in training.

    What: the norm of softmax minus one-hot label, mean over K = 10 trainings with different seeds, each at a tenth of a
        training. The largest are retained.
    Source: Paul et al., "Deep Learning on a Data Diet: Finding Important Examples Early in Training", NeurIPS 2021.
    Cost: K trainings of a tenth of the length, together a whole one, and K forward passes over all samples.
    Caveats: wrong labels have the largest errors. K and the moment come with the evidence: the score is the mean over
        as many short runs as there are.
    """

    name = "el2n"
    needs = "short runs"
    uses = ("error_norms",)

    def score(self, evidence: Evidence, generator: torch.Generator | None = None) -> Tensor:
        evidence.require(self.uses, self.name)
        return torch.stack(evidence.short("error_norms")).mean(0)
