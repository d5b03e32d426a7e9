"""The last known loss of each sample, from what `blocker.observe` reports."""

from __future__ import annotations

import torch
from torch import Tensor

from ...functional import all_finite
from ...state.flags import StickyFlag
from ...state.sample_memory import SampleMemory
from ..base import Candidates, retained_rows


class LastLosses(SampleMemory):
    """One loss per sample; NaN where there is none, or where it was not finite.

    Args:
        num_samples: size of the data set, see `SampleMemory`.
    """

    def __init__(self, num_samples: int | None = None) -> None:
        super().__init__(1, num_samples)
        self._not_finite = StickyFlag()

    def of(self, candidates: Candidates) -> Tensor:
        """(B,)."""
        return self.read(candidates.required_ids, candidates.generator.device).squeeze(1)

    def observe(self, candidates: Candidates, retained: Tensor | None, losses: Tensor) -> None:
        """Remember the losses (S,) of the retained rows."""
        self._not_finite.note(~all_finite(losses))
        ids = retained_rows(candidates.required_ids.to(losses.device, non_blocking=True), retained)
        self.write(ids, losses, candidates.ranks, candidates.size, among=candidates.required_ids)

    def check(self) -> None:
        super().check()
        if self._not_finite.take():
            raise FloatingPointError(
                "blocker.observe got losses that are not finite (NaN or infinite). The samples they belong to count as "
                "unknown; the training itself has probably diverged: lower the learning rate, clip gradients, or check "
                "the inputs"
            )


def known_or_mean(losses_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B,) losses, NaN where unknown. Returns them with NaN replaced by the mean of the known ones; that mean; and (B,)
    which are known."""
    known_B = losses_B.isfinite()
    mean = torch.where(known_B, losses_B, 0.0).sum() / known_B.sum().clamp_min(1)
    return torch.where(known_B, losses_B, mean), mean, known_B
