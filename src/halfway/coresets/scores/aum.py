"""Area under the margin."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import Scored
from ..evidence import Evidence


class AUM(Scored):
    """Retain the samples with the smallest margins over the training.

    What: the true logit minus the largest other logit, mean over all presentations of a whole training. The lowest are
        retained.
    Source: Pleiss et al., "Identifying Mislabeled Data using the Area Under the Margin Ranking", NeurIPS 2020, who look
        for wrong labels with it; as a rule for what to retain in Zheng et al., ICLR 2023.
    Cost: a whole training of the network, 20 bytes per sample.
    Caveats: the lowest margins are where wrong labels are: with few samples retained this collapses (the tables of both
        CCS and the PFB paper show it). Public code takes the margin of probabilities, which is another ranking.
    """

    name = "aum"
    needs = "long run"
    uses = ("dynamics",)

    def score(self, evidence: Evidence, generator: torch.Generator | None = None) -> Tensor:
        evidence.require(self.uses, self.name)
        assert evidence.dynamics is not None
        evidence.dynamics.check()
        return -evidence.dynamics.margins_N
