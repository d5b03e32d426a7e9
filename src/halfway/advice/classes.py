"""How evenly the classes come: where some are rare, the first question is not whom to prune."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .evidence import Evidence
from .learner import is_classes

# Fewer samples of the middle class than this say nothing, and up to this many times as many as it may be chance.
_ENOUGH, _CHANCE = 5, 4
SELECTOR = "class_balanced"


class ClassesSeen:
    """Counts the classes of the batches that go by. Nothing waits for the device until they are counted."""

    def __init__(self) -> None:
        self._targets: list[Tensor] = []
        self.ignored = False

    def ignore(self) -> None:
        """They are whole numbers, but no classes."""
        self.ignored = True

    def note(self, targets: Any) -> None:
        """Targets that are no classes (B,) are ignored."""
        if is_classes(targets) and targets.ndim == 1:
            self._targets.append(targets.detach())

    @property
    def any(self) -> bool:
        """Whether targets were one class per sample."""
        return bool(self._targets) and not self.ignored

    @property
    def uneven(self) -> tuple[int, int] | None:
        """How many samples the rarest and the most frequent class had, if that can hardly be chance."""
        if not self.any:
            return None
        targets = torch.cat(self._targets)
        _, counts = targets[targets >= 0].unique(return_counts=True)  # a negative class is no label
        if not len(counts):
            return None
        smallest, middle, largest = (int(count) for count in (counts.min(), counts.median(), counts.max()))
        return (smallest, largest) if middle >= _ENOUGH and largest >= _CHANCE * middle else None


def note_on(seen: ClassesSeen, evidence: Evidence) -> list[str]:
    """What to say where there are no classes, or uneven ones; nothing elsewhere."""
    if not seen.any:
        return [
            "All evidence is on the classification of images, and the targets are not one class per sample: what is "
            "said about accuracy may not hold here, and no method is recommended."
        ]
    if seen.uneven is None:
        return []
    smallest, largest = seen.uneven
    told = [
        f"{finding.gain} points on {rung.name} (n = {finding.n})"
        for rung in evidence.rungs
        for finding in rung.findings
        if finding.selector == SELECTOR and not finding.settings and finding.gain is not None
    ]
    measured = f" At a reduced scale it was above the better control by {'; '.join(told)}." if told else ""
    return [
        f"The classes are uneven: the rarest was seen {smallest} times, the most frequent {largest} times. If they "
        f"count the same in your evaluation, draw by class, selector={SELECTOR!r}, or weight the loss of full data by "
        f"class; the comparisons above are of even classes.{measured}"
    ]
