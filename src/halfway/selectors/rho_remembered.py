"""RHO-Loss by what is remembered: learnable, and not learnt when it was last seen. Nothing is run to find out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from .base import Candidates, Ranking, Wish
from .tools.draw import gumbel, without_ties
from .tools.irreducible import IrreducibleLosses
from .tools.last_losses import LastLosses, known_or_mean
from .tools.pivotal import standardised


class RhoRemembered(Ranking):
    """Train on the samples whose last loss most exceeded that of a model that was never trained on them.

    What: importance is the last known loss minus the irreducible loss, see `Rho`, and the S largest stay. A sample
        without a known loss has the mean of the others' importance; ties are broken at random. With a `temperature`,
        S are drawn instead, as in `LastLoss`: one after the other, with probabilities proportional to
        exp(z / temperature), where z is the importance, standardised over the batch.
    Source: Mindermann et al., "Prioritized Training on Points that are Learnable, Worth Learning, and Not Yet Learnt",
        ICML 2022, with the loss of the last visit instead of the current one, which is ours.
    Cost: 1 - p, nothing is run on pruned samples: RHO-Loss without its forward pass. 8 bytes per sample of the data
        set, `blocker.observe(losses)`, and the other model's training, once.
    Caveats: the other model must be as good as the one that is trained: one that was much weaker was worse than none
        (-2.6 points against random, one short run on Fashion-MNIST). A pruned sample keeps its old loss, so without a
        temperature an easy one may never return. Observe the loss that the file holds: the plain one.

    Args:
        losses: (N,) irreducible losses by id, or the file that holds them. Required.
        temperature: 0: the largest stay; small prefers them, large is random.
        use_loss: False: minus the irreducible loss alone, a control that shows what the last losses add.
    """

    name = "rho_remembered"
    wants_ids = "required"
    wants_losses: Wish = "required"

    def __init__(
        self, losses: str | Path | Tensor | None = None, temperature: float = 0.0, use_loss: bool = True
    ) -> None:
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature must not be negative, got {temperature}")
        self.temperature = temperature
        self._irreducible = IrreducibleLosses(losses, self.name)
        self.wants_losses = "required" if use_loss else "no"
        self._losses = self.remember("losses", LastLosses(len(self._irreducible))) if use_loss else None

    def importance(self, candidates: Candidates) -> Tensor:
        excess_B = -self._irreducible.of(candidates)
        if self._losses is not None:
            excess_B = self._losses.of(candidates) + excess_B
        excess_B, _, known_B = known_or_mean(excess_B)
        if self.temperature == 0:
            return without_ties(excess_B, candidates.generator)
        z_B = standardised(excess_B.unsqueeze(1), known_B).squeeze(1)
        return gumbel(z_B / self.temperature, candidates.generator)

    def observe(self, candidates: Candidates, retained: Tensor | None, losses: Tensor) -> None:
        if self._losses is not None:
            self._losses.observe(candidates, retained, losses)

    def check(self) -> None:
        self._irreducible.check()
        super().check()

    def config(self) -> dict[str, Any]:
        return {**super().config(), "losses": self._irreducible.fingerprint}
