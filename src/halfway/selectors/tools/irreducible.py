"""The irreducible losses of RHO-Loss: those of a model that was never trained on the samples, by id, from a file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ...state.sample_memory import SampleMemory
from ..base import Candidates

_HOW_TO = (
    "`halfway irreducible RECIPE` writes such a file, and, with images to spare, `halfway train RECIPE --method full "
    "data.holdout=true --save-losses FILE`"
)


class IrreducibleLosses(SampleMemory):
    """One loss per sample of the data set. They never change, and are no part of a state.

    Args:
        losses: (N,) by id, or the file that holds them. None is an error that says where they come from.
        selector: the name of the selector that asks, for that error.

    Attributes:
        fingerprint: enough to distinguish two files, and the same on every machine.
    """

    def __init__(self, losses: str | Path | Tensor | None, selector: str) -> None:
        if losses is None:
            raise ValueError(
                f"the selector {selector!r} compares with the losses of a model trained on other data: "
                f"losses='FILE', or a tensor with one loss per sample id. {_HOW_TO}"
            )
        self._source = "the tensor of irreducible losses" if isinstance(losses, Tensor) else str(losses)
        losses_N = _checked(losses if isinstance(losses, Tensor) else _load(Path(losses)), self._source)
        super().__init__(num_samples=len(losses_N))
        self.load_state_dict({"values": losses_N.unsqueeze(1)})
        self.fingerprint = f"{len(losses_N)} samples, mean {losses_N.double().mean().item():.6g}"

    def of(self, candidates: Candidates) -> Tensor:
        """(B,)."""
        try:
            return self.read(candidates.required_ids, candidates.generator.device).squeeze(1)
        except ValueError as error:
            raise ValueError(self._too_few()) from error

    def check(self) -> None:
        try:
            super().check()
        except ValueError as error:
            raise ValueError(self._too_few()) from error

    def _too_few(self) -> str:
        return (
            f"{self._source} holds the losses of {len(self)} samples, ids 0 to {len(self) - 1}, but the batch has an "
            f"id that is not among them; make it from the data set you train on ({_HOW_TO})"
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
