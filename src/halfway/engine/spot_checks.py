"""In every so many replayed steps one operation, and the features at the cut, are computed and compared."""

from __future__ import annotations

import torch
from torch import Tensor

from .cut import Cut
from .pending import Pending
from .plan import tolerance
from .proof import ERROR, features_off
from .replay import Replayer

EVERY = 16


class SpotChecks:
    """Remembers on the device how far replayed values were off; nothing waits for it but `wrong`."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._off: dict[str, Tensor] = {}

    def compare(self, pending: Pending, replayer: Replayer, output: object) -> None:
        """A replay has reached the cut, with this output."""
        if not pending.audited or pending.plan.mixed_features:
            return
        found = self._cut.features([output], len(pending.indices))
        self._note(f"the features of {self._cut.name!r}", features_off(found, pending.probe, pending.indices))
        if pending.spot is not None and replayer.mismatch is not None:
            self._note(pending.plan.ops[pending.spot].describe(), replayer.mismatch / tolerance(found))

    def _note(self, what: str, off: Tensor) -> None:
        self._off[what] = torch.maximum(self._off.get(what, torch.zeros_like(off)), off)

    def wrong(self) -> list[str]:
        """What was further off than rounding explains, since this was last asked. Waits for the device."""
        wrong = [what for what, off in self._off.items() if not off <= ERROR]
        self._off.clear()
        return wrong
