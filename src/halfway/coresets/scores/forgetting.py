"""How often a sample is forgotten while it is learned."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import Scored
from ..evidence import Evidence


class Forgetting(Scored):
    """Retain the samples that training keeps forgetting.

    What: the number of times that a sample was classified correctly at one presentation and wrongly at the next, over
        a whole training. One that was never classified correctly counts as forgotten infinitely often. The largest are
        retained, equal ones at random.
    Source: Toneva et al., "An Empirical Study of Example Forgetting during Deep Neural Network Learning", ICLR 2019.
    Cost: a whole training of the network, 20 bytes per sample.
    Caveats: wrong labels are forgotten most, or never learned. Presentations are those of the training itself, so they
        are augmented, as in the source. Public code counts what was never learned as 0 forgettings, which prunes it
        first. A short training has few different counts, and then much of the choice is random.
    """

    name = "forgetting"
    needs = "long run"
    uses = ("dynamics",)

    def score(self, evidence: Evidence, generator: torch.Generator | None = None) -> Tensor:
        evidence.require(self.uses, self.name)
        assert evidence.dynamics is not None
        evidence.dynamics.check()
        forgotten_N = evidence.dynamics.forgotten_N.to(torch.float32)
        return torch.where(evidence.dynamics.learned_N, forgotten_N, torch.inf)
