"""Measuring time and memory of training steps, side by side."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from ..progress import Bar

Step = Callable[[], None]


class Clock:
    """Times a step, and its phases if `mark` is called at their ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends: list[float] = []

    def mark(self) -> None:
        """Mark the end of a phase."""
        self._ends.append(self._now())

    def phases(self, step: Step) -> list[float]:
        """Seconds of each phase of the step; one more than there are marks."""
        self._ends = []
        start = self._now()
        step()
        self.mark()
        return [end - begin for begin, end in zip([start, *self._ends], self._ends, strict=False)]

    def _now(self) -> float:
        if self._device.type == "cuda":  # never run
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def interleaved(
    steps: dict[str, Step], rounds: int, clock: Clock, progress: str | None
) -> dict[str, list[list[float]]]:
    """Seconds of every phase of every step in every round. Rounds begin with another step each."""
    seconds: dict[str, list[list[float]]] = {way: [] for way in steps}
    order = list(steps)
    with Bar(rounds * len(order), progress or "", "step", show=progress is not None, leave=False) as bar:
        for i in range(rounds):
            for way in order[i % len(order) :] + order[: i % len(order)]:
                seconds[way].append(clock.phases(steps[way]))
                bar.update()
    return seconds


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def peak_bytes(step: Step, device: torch.device) -> int:
    """The most bytes of tensors alive at once while `step` runs, beyond those alive when it begins."""
    if device.type == "cuda":  # never run
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
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
    return peak
