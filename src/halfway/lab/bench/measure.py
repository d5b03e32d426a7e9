"""Measuring time and memory of training steps, side by side."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..progress import Bar

Step = Callable[[], None]


class Timed(NamedTuple):
    """Seconds of each phase of a step, and how long the host was busy with all of them."""

    phases: list[float]
    host: float

    @property
    def total(self) -> float:
        return sum(self.phases)


class Clock:
    """Times a step, and its phases if `mark` is called at their ends.

    On CUDA by events: the device notes when it gets to a mark, and nothing waits for it before the end of the step.
    There a step may take longer than it keeps the host busy; if it does not, the device waits for launches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark the end of a phase."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def time(self, step: Step) -> Timed:
        """Run the step; it has one phase more than there are marks in it."""
        self._wait()
        begin = time.perf_counter()
        self._marks = []
        self.mark()
        step()
        self.mark()
        host = time.perf_counter() - begin
        self._wait()
        return Timed([self._between(a, b) for a, b in itertools.pairwise(self._marks)], host)

    def _between(self, a: Any, b: Any) -> float:
        return a.elapsed_time(b) / 1000 if self._cuda else b - a

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)


def interleaved(steps: dict[str, Step], rounds: int, clock: Clock, progress: str | None) -> dict[str, list[Timed]]:
    """Every step in every round. Rounds begin with another step each."""
    taken: dict[str, list[Timed]] = {way: [] for way in steps}
    order = list(steps)
    with Bar(rounds * len(order), progress or "", "step", show=progress is not None, leave=False) as bar:
        for i in range(rounds):
            for way in order[i % len(order) :] + order[: i % len(order)]:
                taken[way].append(clock.time(steps[way]))
                bar.update()
    return taken


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


class Allocated(NamedTuple):
    """Bytes of tensors beyond those alive when a step began: the most at once, and those still alive at its end."""

    peak: int
    left: int


def allocated(step: Step, device: torch.device) -> Allocated:
    """What the allocator says about a step."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        after = torch.cuda.memory_allocated(device)
        return Allocated(torch.cuda.max_memory_allocated(device) - before, after - before)
    # The CPU's allocator keeps no count, but reports every allocation and release to the profiler.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it complains that there is no GPU
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    results = profile.profiler.kineto_results
    events = [e for e in results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return Allocated(peak, alive)
