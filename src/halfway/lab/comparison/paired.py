"""Differences between methods, paired by seed: same initial weights and batches, so that what they share cancels.

Few seeds say little about the spread of one difference, and that of three seeds alone is often far too small or too
large by chance. What is left of all scores after a mean per method and one per seed is taken out (a two-way layout,
score ~ method + seed) says more: its variance is pooled over all methods of the comparison, and so are its degrees of
freedom. With two methods this is the paired t test.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Of all intervals and tests: they are wrong in one case of twenty.
LEVEL = 0.05
# Scores are counts of test samples. A spread below this is a rounding error, and gives no interval.
_NO_SPREAD = 1e-9

Scores = Mapping[int, float]


@dataclass(frozen=True)
class Residual:
    """What scores vary by, beside method and seed.

    deviation: standard deviation of a single score.
    df: degrees of freedom.
    """

    deviation: float
    df: int


@dataclass(frozen=True)
class Difference:
    """A method's score minus its rival's, in points.

    mean: of the paired differences.
    error: its standard error; None for a single seed.
    low, high: the 95 % t interval; None for a single seed, and where nothing varies: a handful of equal counts says
        nothing about the spread.
    n: number of seeds that both have.
    df: degrees of freedom of the interval; None without one, and in older files, where it is n - 1.
    """

    mean: float
    error: float | None
    low: float | None
    high: float | None
    n: int
    df: int | None = None

    @property
    def told_apart(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    def __str__(self) -> str:
        """+0.31 [-0.10, +0.72]"""
        return f"{self.mean:+.2f}" if self.low is None else f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def residual(scores: Mapping[Any, Scores], families: Mapping[Any, Hashable] | None = None) -> Residual | None:
    """The pooled residual of score ~ method + seed, by least squares; None if nothing is left to estimate it from.

    Args:
        scores: by method and seed. Seeds may be missing.
        families: the family of each method. A seed has one effect in each family, because the same seed means nothing
            common to, say, two batch sizes. None: all methods are one family.
    """
    import numpy as np

    rows = [(method, seed, score) for method, by_seed in scores.items() for seed, score in by_seed.items()]
    methods = list(scores)
    blocks = list(dict.fromkeys(((families or {}).get(method), seed) for method, seed, _ in rows))
    design = np.zeros((len(rows), len(methods) + len(blocks)))
    for i, (method, seed, _) in enumerate(rows):
        design[i, methods.index(method)] = 1
        design[i, len(methods) + blocks.index(((families or {}).get(method), seed))] = 1
    values = np.array([score for _, _, score in rows])
    fit, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    df = len(rows) - int(rank)
    if df < 1:
        return None
    return Residual(float(((values - design @ fit) ** 2).sum() / df) ** 0.5, df)


def difference(mine: Scores, others: Scores, pooled: Residual | None) -> Difference | None:
    """`mine` minus `others` over the seeds both have; None if there is no such seed."""
    return contrast(mine, [(1.0, others)], pooled)


def contrast(mine: Scores, rival: Sequence[tuple[float, Scores]], pooled: Residual | None) -> Difference | None:
    """`mine` minus a weighted mean of others over the seeds that all of them have; None if there is no such seed.

    Under score ~ method + seed the mean of n such differences has the variance (1 + sum of squared weights) / n of a
    single score: the effects of the seeds cancel, because the weights sum to 1.
    """
    seeds = [seed for seed in mine if all(seed in scores for _, scores in rival)]
    if not seeds:
        return None
    mean = statistics.fmean(mine[seed] - sum(weight * scores[seed] for weight, scores in rival) for seed in seeds)
    if pooled is None or len(seeds) < 2:
        return Difference(mean, None, None, None, len(seeds))
    error = pooled.deviation * ((1 + sum(weight**2 for weight, _ in rival)) / len(seeds)) ** 0.5
    if error < _NO_SPREAD:
        return Difference(mean, error, None, None, len(seeds))
    return with_interval(mean, error, len(seeds), pooled.df)


def with_interval(mean: float, error: float, n: int, df: int) -> Difference:
    """A difference with its t interval."""
    from scipy.stats import t

    half = float(t.ppf(1 - LEVEL / 2, df)) * error
    return Difference(mean, error, mean - half, mean + half, n, df)


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None for a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
