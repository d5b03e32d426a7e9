"""Differences between methods, paired by seed: same initial weights and batches, so that what they share cancels."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Scores are counts of test samples. A spread below this is a rounding error, and gives no interval.
_NO_SPREAD = 1e-9


@dataclass(frozen=True)
class Difference:
    """A method's score minus its rival's, in points.

    mean: of the paired differences.
    error: its standard error; None for a single seed.
    low, high: the 95 % t interval; None for a single seed, and if all differences are equal: a handful of equal counts
        says nothing about the spread.
    n: number of seeds that both have.
    """

    mean: float
    error: float | None
    low: float | None
    high: float | None
    n: int

    def __str__(self) -> str:
        """+0.31 [-0.10, +0.72]"""
        return f"{self.mean:+.2f}" if self.low is None else f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def difference(mine: Mapping[int, float], others: Mapping[int, float]) -> Difference | None:
    """`mine` minus `others` over the seeds both have; None if there is no such seed."""
    from scipy.stats import ttest_rel

    seeds = [seed for seed in mine if seed in others]
    if not seeds:
        return None
    pairs = [mine[seed] - others[seed] for seed in seeds]
    mean, error = statistics.fmean(pairs), standard_error(pairs)
    if error is None or error < _NO_SPREAD:
        return Difference(mean, error, None, None, len(seeds))
    test = ttest_rel([mine[seed] for seed in seeds], [others[seed] for seed in seeds])
    interval = test.confidence_interval(0.95)
    return Difference(mean, error, float(interval.low), float(interval.high), len(seeds))


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None for a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
