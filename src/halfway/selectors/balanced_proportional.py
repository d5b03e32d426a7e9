"""Hard samples are preferred and near-twins compete, both by what is remembered of each sample: nothing is probed."""

from __future__ import annotations

from .balanced import distances_of
from .balanced_remembered import BalancedRemembered
from .base import Candidates, Selection
from .tools.pivotal import pivotal
from .tools.proportional import Proportions, Scale


class BalancedProportional(BalancedRemembered):
    """Draws samples with probabilities proportional to their last loss, near neighbours rarely together.

    What: the probabilities of `LastLossProportional`, drawn by the local pivotal method of `BalancedRemembered` on the
        features that each sample had when it was last trained on. Two samples that are each other's nearest neighbour
        compete to stay, the harder one with the better chance; with known classes, samples compete within their class
        as long as they can. Every sample stays with exactly its probability (to within 2^-30), whatever the distances.
    Source: Grafström, Lundström & Schelin, "Spatially Balanced Sampling through the Pivotal Method", Biometrics 2012.
        Its use for training is ours. On the map (results/README.md, a reduced scale) it was worse than random pruning
        on three rungs of six, and better on none.
    Cost: 1 - p, nothing is run on pruned samples: no probe, `at=None`. 4 `dim` + 4 bytes per sample of the data set,
        and `blocker.observe(losses)`. Then O(B^2 (D + log B)) for the choice, which is little for batches of up to
        some hundreds.
    Caveats: those of `LastLossProportional` and of `BalancedRemembered`.

    Args:
        scale, floor, temperature, cap, num_classes: see `LastLossProportional`.
        dim, module, num_samples, channel_dim: see `BalancedRemembered`.
        target: which part of the batch holds the classes, see `Balanced`.
    """

    name = "balanced_proportional"
    wants_losses = "required"

    def __init__(
        self,
        scale: Scale = "loss",
        floor: float = 0.1,
        temperature: float = 1.0,
        cap: float | str | None = None,
        num_classes: int | None = None,
        dim: int = 64,
        module: str | None = None,
        num_samples: int | None = None,
        channel_dim: int | None = None,
        target: int | str | None = None,
    ) -> None:
        super().__init__(dim, module, True, num_samples, channel_dim, target)
        self.wants_losses = "required"
        self.proportions = Proportions(scale, floor, temperature, cap, num_classes)

    def select(self, candidates: Candidates, count: int) -> Selection:
        assert self._losses is not None
        x_BD = self._features.read(candidates.required_ids, candidates.generator.device)
        # The last loss is no coordinate here, as it is in the base class: it is what the probabilities are made of.
        d_BB = distances_of(candidates, x_BD, x_BD.isfinite().all(1), None)
        pi_B = self.proportions.probabilities(self._losses.of(candidates), count)
        return Selection(pivotal(d_BB, count, candidates.generator, pi_B), pi_B)
