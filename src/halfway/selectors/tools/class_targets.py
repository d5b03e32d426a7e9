"""One class per sample, for selectors that cannot do without."""

from __future__ import annotations

from torch import Tensor

from ...state.flags import StickyFlag
from ..base import Candidates, Selector
from .class_shares import largest_class


class ClassTargets:
    """Reads the classes of a batch. Targets that have none are an error, at once where the host can see it."""

    def __init__(self, selector: Selector) -> None:
        self._needed = (
            f"the selector {selector.name!r} needs one class per sample, integers (B,) or probabilities (B, C); if "
            f"they are elsewhere in the batch, say where: {type(selector).__name__}(target=...)"
        )
        self._no_probabilities = StickyFlag()

    def of(self, candidates: Candidates) -> Tensor:
        """(B,) int64; negative without a label."""
        found = largest_class(candidates.targets, candidates.size, candidates.generator.device)
        if found is None:
            raise ValueError(self._needed)
        self._no_probabilities.note(found.wrong)
        return found.classes_B

    def check(self) -> None:
        """Raise if there were no probabilities. May wait for the device."""
        if self._no_probabilities.take():
            raise ValueError(f"{self._needed}; it met numbers (B, C) that are no probabilities")
