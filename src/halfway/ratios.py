"""Pruning ratios that change in the course of a run: `ramp`, `steps`, or any function of the epoch.

Whatever they are given as, ratios become a table of a few steps: each ratio means another number of retained samples,
and so another proof, another compiled graph, another choice of kernels.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .schedule import Schedule
from .settings import share, whole

# Distinct ratios in a run.
MOST = 8
# A function of the epoch is read for so many epochs where the schedule does not say when pruning ends.
_FORESEEN = 10_000


@dataclass(frozen=True)
class Ramp:
    """See `ramp`."""

    first: float
    last: float


@dataclass(frozen=True)
class Steps:
    """See `steps`."""

    table: Mapping[int, float]


def ramp(first: float, last: float) -> Ramp:
    """A pruning ratio that goes in equal steps, at most 8 of them, from `first` where the schedule begins to `last`
    where it ends: `ForwardBlocker(..., prune_ratio=halfway.ramp(0.0, 0.8), schedule=halfway.Schedule(0, 90))`."""
    return Ramp(share("first", first), share("last", last))


def steps(table: Mapping[int, float]) -> Steps:
    """A pruning ratio by the epoch it begins in: `halfway.steps({0: 0.0, 5: 0.3, 60: 0.5})`; 0 before the first."""
    if not isinstance(table, Mapping) or not table:
        raise TypeError(f"steps takes ratios by the epoch they begin in, {{0: 0.0, 5: 0.3}}, got {table!r}")
    read = {whole("an epoch of steps", epoch): share("a ratio of steps", ratio) for epoch, ratio in table.items()}
    if min(read) < 0:
        raise ValueError(f"epochs begin with 0, got {min(read)}")
    return Steps(dict(sorted(read.items())))


PruneRatio = float | Ramp | Steps | Callable[[int], float]


class Ratios:
    """The ratio at each position of a run, in the unit of its schedule.

    Args:
        given: a number, `ramp(...)`, `steps(...)`, or a function of the position.
        schedule: when samples are pruned at all.
    """

    def __init__(self, given: PruneRatio, schedule: Schedule) -> None:
        table = _table(given, schedule)
        self._starts, self._values = list(table), list(table.values())
        distinct = len(set(self._values))
        if distinct > MOST:
            raise ValueError(
                f"prune_ratio takes {distinct} different values in this run, and every one means another batch size; "
                f"use at most {MOST}: halfway.ramp(first, last) goes in so many steps, or round what the function gives"
            )

    def at(self, position: int) -> float:
        return self._values[max(bisect.bisect_right(self._starts, position) - 1, 0)]

    @property
    def largest(self) -> float:
        return max(self._values)

    @property
    def change(self) -> bool:
        """Whether there is more than one."""
        return len(self._values) > 1

    def mean(self, schedule: Schedule, length: int) -> float:
        """Over those of the first `length` positions at which samples are pruned; 0 if there are none."""
        pruned = [self.at(position) for position in range(length) if schedule.active(position)]
        return sum(pruned) / len(pruned) if pruned else 0.0

    def config(self) -> float | list[list[float]]:
        """For a state: one number, or (position, ratio) where it changes."""
        if not self.change:
            return self._values[0]
        return [[start, value] for start, value in zip(self._starts, self._values, strict=True)]

    def __str__(self) -> str:
        return f"{self._values[0]:g} to {self._values[-1]:g}" if self.change else f"{self._values[0]:g}"


def _table(given: Any, schedule: Schedule) -> dict[int, float]:
    """The ratio by the position it begins at; the first is 0."""
    if isinstance(given, Ramp):
        return _ramp(given, schedule)
    if isinstance(given, Steps):
        return _merged({0: 0.0, **given.table})
    if callable(given):
        return _merged(_called(given, schedule))
    return {0: share("prune_ratio", given)}


def _ramp(given: Ramp, schedule: Schedule) -> dict[int, float]:
    if schedule.stop is None:
        raise ValueError("a ramp ends where pruning does: pass schedule=halfway.Schedule(start, stop)")
    length = schedule.stop - schedule.start
    levels = min(MOST, length)
    if levels == 1:
        return {0: given.first}
    table: dict[int, float] = {}
    for position in range(length):
        level = round((levels - 1) * position / (length - 1))
        ratio = given.first + (given.last - given.first) * level / (levels - 1)
        table.setdefault(schedule.start + position if position else 0, round(ratio, 12))
    return _merged(table)


def _called(function: Callable[[int], float], schedule: Schedule) -> dict[int, float]:
    """What the function gives for every position of the run; a table that ends earlier keeps its last value."""
    table: dict[int, float] = {}
    for position in range(schedule.stop if schedule.stop is not None else _FORESEEN):
        try:
            found = function(position)
        except LookupError:
            if not table:
                raise
            break
        table[position] = share(f"prune_ratio({position})", found)
    return table or {0: share("prune_ratio(0)", function(0))}


def _merged(table: dict[int, float]) -> dict[int, float]:
    """Without positions where nothing changes."""
    merged: dict[int, float] = {}
    for position, ratio in table.items():
        if not merged or ratio != next(reversed(merged.values())):
            merged[position] = ratio
    return merged
