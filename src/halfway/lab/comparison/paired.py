"""Differences between methods, paired by seed: same weights, same batches, so that what they share cancels."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """Mean of the paired differences over `n` seeds, with standard error and 95 % t interval (None for one seed)."""

    mean: float
    error: float | None
    low: float | None
    high: float | None
    n: int

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def difference(mine: Mapping[int, float], others: Mapping[int, float]) -> Difference | None:
    """`mine` minus `others` over the seeds both have; None if there is no such seed."""
    from scipy.stats import t

    pairs = [mine[seed] - others[seed] for seed in mine if seed in others]
    if not pairs:
        return None
    mean, error = statistics.fmean(pairs), standard_error(pairs)
    if error is None:
        return Difference(mean, None, None, None, 1)
    margin = float(t.ppf(0.975, len(pairs) - 1)) * error
    return Difference(mean, error, mean - margin, mean + margin, len(pairs))


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None for a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
