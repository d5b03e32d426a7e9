"""What comes back from training, batch by batch, until it is time to learn from it."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from torch import Tensor

from ..state.host_copy import HostCopy


class Report(NamedTuple):
    """Of one trained batch.

    ids: (S,) of its samples.
    losses: (S,), if they were reported.
    watched: (S, ...), what entered the watched layer, if one is.
    """

    ids: Tensor
    losses: Tensor | None
    watched: Tensor | None


class Reports:
    """The reports of an epoch, in order. They are copied to the host on the way; only `take` may wait for that.

    Attributes:
        arrived: how many there were in this epoch.
    """

    def __init__(self) -> None:
        self.arrived = 0
        self._waiting: deque[list[HostCopy | None]] = deque()

    def add(self, report: Report) -> None:
        self._waiting.append(_copied(report))
        self.arrived += 1

    def take(self, until: int | None = None) -> list[Report]:
        """The reports that were not taken yet, up to the first `until` of the epoch; None: all that have arrived."""
        taken = []
        while self._waiting and (until is None or self.arrived - len(self._waiting) < until):
            taken.append(_on_host(self._waiting.popleft()))
        return taken

    def new_epoch(self) -> None:
        assert not self._waiting, "they are taken before"
        self.arrived = 0

    def state_dict(self) -> dict[str, Any]:
        return {"arrived": self.arrived, "waiting": [_on_host(copies)._asdict() for copies in self._waiting]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.arrived = int(state["arrived"])
        self._waiting = deque(_copied(Report(**report)) for report in state["waiting"])


def _copied(report: Report) -> list[HostCopy | None]:
    return [None if t is None else HostCopy(t) for t in report]


def _on_host(copies: list[HostCopy | None]) -> Report:
    ids, losses, watched = (None if each is None else each.value() for each in copies)
    assert ids is not None
    return Report(ids, losses, watched)
