"""What comes back from training, batch by batch, until it is time to learn from it."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor


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
        self._waiting: deque[tuple[Report, list[Any]]] = deque()

    def add(self, report: Report) -> None:
        events: list[Any] = []
        ids, losses, watched = (None if t is None else _to_host(t, events) for t in report)
        assert ids is not None
        self._waiting.append((Report(ids, losses, watched), events))
        self.arrived += 1

    def take(self, until: int | None = None) -> list[Report]:
        """The reports that were not taken yet, up to the first `until` of the epoch; None: all that have arrived."""
        taken = []
        while self._waiting and (until is None or self.arrived - len(self._waiting) < until):
            report, events = self._waiting.popleft()
            for event in events:
                event.synchronize()
            taken.append(report)
        return taken

    def new_epoch(self) -> None:
        assert not self._waiting, "they are taken before"
        self.arrived = 0

    def state_dict(self) -> dict[str, Any]:
        waiting = []
        for report, events in self._waiting:
            for event in events:
                event.synchronize()
            waiting.append(report._asdict())
        return {"arrived": self.arrived, "waiting": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.arrived = int(state["arrived"])
        self._waiting = deque((Report(**report), []) for report in state["waiting"])


def _to_host(t: Tensor, events: list[Any]) -> Tensor:
    """A copy on the host, complete once the event that is added to `events` has happened."""
    t = t.detach()
    if t.device.type == "cpu":
        return t.clone()  # the caller's may be overwritten before it is looked at
    copy = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True).copy_(t, non_blocking=True)
    event = torch.get_device_module(t.device).Event()
    event.record()
    events.append(event)
    return copy
