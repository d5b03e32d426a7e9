"""Control curves: what random pruning or a shorter training reaches at any cost, so that a method can be judged at its
own.

A curve goes through a control's groups and full data. Between them it is linear in the logarithm of the cost: scores
rise ever more slowly with it, and straight lines in the cost itself would lie below what the control reaches. It is
never extended beyond its ends. A curve of fewer than three points gives its points only.

Legend: K points, n seeds, R resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from .paired import Difference, Residual, Scores, contrast

# Runs whose FLOPs differ by less than this, relative to full data, count as equal in cost: batches prune whole samples.
SAME_COST = 0.01
FEWEST_POINTS = 3
RESAMPLES = 2000


@dataclass(frozen=True)
class Point:
    """A group of a control: what its runs cost relative to full data, and their scores by seed."""

    cost: float
    scores: Scores


@dataclass(frozen=True)
class Standing:
    """A method beside a control at the same cost.

    difference: the method's score minus the curve's, with the interval from the pooled residual.
    bootstrap: the 95 % interval of the same by resampling seeds; None for a single seed. With few seeds it is too
        narrow.
    equivalent_cost: the cost at which the control reaches the method's score, and its 95 % interval by resampling
        seeds; an end of the curve where it is never reached. None without a curve.
    ends: the cheapest and the dearest point of the curve.
    """

    difference: Difference
    bootstrap: tuple[float, float] | None = None
    equivalent_cost: tuple[float, float, float] | None = None
    ends: tuple[float, float] | None = None

    @property
    def equivalent(self) -> str:
        """0.712 [0.650, 0.803]; with a sign where the curve ends."""
        if self.equivalent_cost is None or self.ends is None:
            return ""
        cost, low, high = self.equivalent_cost
        sign = "≤ " if cost <= self.ends[0] else "≥ " if cost >= self.ends[1] else ""
        return f"{sign}{cost:.3f} [{low:.3f}, {high:.3f}]"


def standing(cost: float, scores: Scores, points: Sequence[Point], pooled: Residual | None) -> Standing | None:
    """A method beside a control; None if the curve does not reach the method's cost, or they share no seed."""
    difference = difference_at(cost, scores, points, pooled)
    points = sorted(points, key=lambda point: point.cost)
    weights = weights_at(cost, [point.cost for point in points])
    if difference is None or weights is None:
        return None
    return _with_bootstrap(Standing(difference), scores, points, weights)


def difference_at(cost: float, scores: Scores, points: Sequence[Point], pooled: Residual | None) -> Difference | None:
    """A method's score minus that of a control at the same cost; None where `standing` is."""
    points = sorted(points, key=lambda point: point.cost)
    weights = weights_at(cost, [point.cost for point in points])
    if weights is None:
        return None
    return contrast(scores, [(w, p.scores) for w, p in zip(weights, points, strict=True) if w], pooled)


def weights_at(cost: float, costs: Sequence[float]) -> list[float] | None:
    """The weights with which the points of a curve, sorted by cost, give its value; None where there is none."""
    if not costs:
        return None
    nearest = min(range(len(costs)), key=lambda k: abs(costs[k] - cost))
    out = [0.0] * len(costs)
    if costs[0] < cost < costs[-1] and len(costs) >= FEWEST_POINTS:
        right = next(k for k, c in enumerate(costs) if c >= cost)
        share = log(cost / costs[right - 1]) / log(costs[right] / costs[right - 1])
        out[right - 1], out[right] = 1 - share, share
        return out
    if abs(costs[nearest] - cost) > SAME_COST:
        return None
    out[nearest] = 1.0
    return out


def reached_at(score: Any, values: Any, costs: Sequence[float]) -> Any:
    """The least cost at which each of R curves reaches each of R scores; the last cost where it never does.

    Args:
        score: (R,).
        values: (R, K), of the curves at `costs`.
    """
    import numpy as np

    found = np.full(len(score), costs[-1])
    open_ = score > values[:, 0]
    found[~open_] = costs[0]
    for k in range(1, len(costs)):
        here = open_ & (score <= values[:, k])
        before, after = values[here, k - 1], values[here, k]
        share = (score[here] - before) / (after - before)
        found[here] = costs[k - 1] * (costs[k] / costs[k - 1]) ** share
        open_ &= ~here
    return found


def _with_bootstrap(plain: Standing, scores: Scores, points: Sequence[Point], weights: Sequence[float]) -> Standing:
    """Seeds are drawn with replacement, for the method and all points at once: they are paired."""
    import numpy as np

    curve = len(points) >= FEWEST_POINTS
    used = [(w, p) for w, p in zip(weights, points, strict=True) if w or curve]
    seeds = [seed for seed in scores if all(seed in p.scores for _, p in used)]
    if not seeds:
        return plain
    table = np.array([[values[seed] for seed in seeds] for values in (scores, *(p.scores for _, p in used))])
    drawn = np.random.default_rng(0).integers(len(seeds), size=(RESAMPLES, len(seeds)))
    # The first row is the sample itself.
    means = np.concatenate([table.mean(1)[None], table[:, drawn].mean(2).T])
    mine, controls = means[:, 0], means[:, 1:]
    differences = mine - controls @ np.array([w for w, _ in used])
    several = len(seeds) > 1
    bootstrap = _interval(differences[1:]) if several else None
    if not curve:
        return Standing(plain.difference, bootstrap)
    costs = [p.cost for _, p in used]
    reached = reached_at(mine, controls, costs)
    low, high = _interval(reached[1:]) if several else (costs[0], costs[-1])
    return Standing(plain.difference, bootstrap, (float(reached[0]), low, high), (costs[0], costs[-1]))


def _interval(values: Any) -> tuple[float, float]:
    import numpy as np

    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
