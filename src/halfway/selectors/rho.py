"""RHO-Loss: learnable, worth learning, and not yet learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..state.sample_memory import SampleMemory
from .base import Candidates, OutputRanking
from .tools.losses import LossFunction

_HOW_TO = "`halfway train RECIPE --method full data.holdout=true --save-losses FILE` writes such a file"


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
        if losses is None:
            raise ValueError(
                f"the selector 'rho' compares with the losses of a model trained on other data: Rho('FILE'), or a "
                f"tensor with one loss per sample id. {_HOW_TO}"
            )
        self._source = "the tensor of irreducible losses" if isinstance(losses, Tensor) else str(losses)
        irreducible_N = _checked(losses if isinstance(losses, Tensor) else _load(Path(losses)), self._source)
        self._irreducible = SampleMemory(num_samples=len(irreducible_N))
        self._irreducible.load_state_dict({"values": irreducible_N.unsqueeze(1)})
        # Enough to distinguish two files, and the same on every machine.
        self._fingerprint = f"{len(irreducible_N)} samples, mean {irreducible_N.double().mean().item():.6g}"

    def importance(self, candidates: Candidates) -> Tensor:
        losses_B = self.losses(candidates)
        try:
            irreducible_B = self._irreducible.read(candidates.required_ids, losses_B.device).squeeze(1)
        except ValueError as error:
            raise ValueError(self._too_few()) from error
        return losses_B - irreducible_B

    def check(self) -> None:
        try:
            self._irreducible.check()
        except ValueError as error:
            raise ValueError(self._too_few()) from error
        super().check()

    def config(self) -> dict[str, Any]:
        return {**super().config(), "losses": self._fingerprint}

    def _too_few(self) -> str:
        return (
            f"{self._source} holds the losses of {len(self._irreducible)} samples, ids 0 to "
            f"{len(self._irreducible) - 1}, but the batch has an id that is not among them; make it from the data set "
            f"you train on ({_HOW_TO})"
        )


def _load(path: Path) -> Tensor:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} with irreducible losses; {_HOW_TO}")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} is not a file of losses ({type(error).__name__}); {_HOW_TO}") from error
    losses = found.get("losses") if isinstance(found, dict) else None
    if not isinstance(losses, Tensor):
        raise ValueError(f"{path} holds no tensor 'losses'; {_HOW_TO}")
    return losses


def _checked(losses: Tensor, source: str) -> Tensor:
    """(N,) float32."""
    if losses.ndim != 1 or not len(losses) or not losses.is_floating_point():
        raise ValueError(
            f"{source} must be one number per sample, shape (N,), not {losses.dtype} of shape {tuple(losses.shape)}"
        )
    missing = int((~losses.isfinite()).sum())
    if missing:
        raise ValueError(
            f"{source} has no finite loss for {missing} of {len(losses)} samples, for example for id "
            f"{int((~losses.isfinite()).nonzero()[0])}; it must cover the whole data set ({_HOW_TO})"
        )
    return losses.detach().to(torch.float32)
