"""RHO-Loss: learnable, worth learning, and not yet learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from .base import Candidates, OutputRanking
from .tools.irreducible import IrreducibleLosses
from .tools.losses import LossFunction


class Rho(OutputRanking):
    """Train on the samples whose loss most exceeds that of a model that was never trained on them.

    What: importance is the sample's loss minus its irreducible loss, that of a model trained on other (holdout) data.
        Noise is just as hard for that model and drops out, as does what is already learnt. What remains can be learnt,
        and is not yet.
    Source: Mindermann et al., "Prioritized Training on Points that are Learnable, Worth Learning, and Not Yet Learnt",
        ICML 2022. They retain 10 % of a large batch loaded for the purpose; here the batch itself is pruned. They take
        the irreducible losses from the checkpoint with the lowest validation loss, `halfway train --save-losses` from
        the last one.
    Cost: the forward pass of all samples, see `OutputRanking`, and the other model's training, once.
    Caveats: needs ids. A sample has one irreducible loss, however it is augmented. Losses of a model that was trained
        on the same samples are close to 0 rather than irreducible, and `Rho` then amounts to `Loss`.

    Args:
        losses: (N,) irreducible losses by id, or the file that holds them. Required.
        loss_fn, target: see `OutputRanking`; the losses in the file should come from the same function.
    """

    name = "rho"
    wants_ids = "required"

    def __init__(
        self,
        losses: str | Path | Tensor | None = None,
        loss_fn: LossFunction | None = None,
        target: int | str | None = None,
    ) -> None:
        super().__init__(loss_fn, target)
        self._irreducible = IrreducibleLosses(losses, self.name)

    def importance(self, candidates: Candidates) -> Tensor:
        return self.losses(candidates) - self._irreducible.of(candidates)

    def check(self) -> None:
        self._irreducible.check()
        super().check()

    def config(self) -> dict[str, Any]:
        return {**super().config(), "losses": self._irreducible.fingerprint}
