"""What a method gains over the better of its two controls at its own cost.

The controls are random pruning without window and full data for fewer steps, each a curve over the cost that ends in
full data, see `comparison.curves`. The better one is that with the larger mean at the method's cost. Of two means the
larger one is a little too large by chance, so that a gain is rather understated, and a loss rather overstated.

Legend: K points of a curve.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..comparison.curves import FEWEST_POINTS, Point, difference_at, reached_at, weights_at
from ..comparison.paired import Difference, Residual, Scores, residual
from .arms import Arm

Control = Literal["random", "shorter"]
CONTROLS: tuple[Control, ...] = ("random", "shorter")
Curves = Mapping[Control, Sequence[Point]]


@dataclass(frozen=True)
class Equivalent:
    """The least cost at which a control reaches a method's score.

    cost: an end of the curve where it is never reached.
    low, high: where it reaches the ends of the gain's 95 % interval; None if there is no interval.
    ends: the cheapest and the dearest point of the curve.
    """

    cost: float
    low: float | None
    high: float | None
    ends: tuple[float, float]

    def __str__(self) -> str:
        """0.71 [0.65, 0.80]; with a sign where the curve ends before a score is reached: 0.73 [0.54, ≥ 1.00]"""
        interval = (
            "" if self.low is None or self.high is None else f" [{self._text(self.low)}, {self._text(self.high)}]"
        )
        return f"{self._text(self.cost)}{interval}"

    def sign(self, cost: float) -> str:
        """Of a cost at an end of the curve, where the score is not reached before."""
        return "≤ " if cost <= self.ends[0] else "≥ " if cost >= self.ends[1] else ""

    def _text(self, cost: float) -> str:
        return f"{self.sign(cost)}{cost:.2f}"


@dataclass(frozen=True)
class Beside:
    """An arm beside its controls at its own cost, over the seeds that they all have.

    differences: to each control that reaches that cost.
    better: the control with the larger mean there; None unless both do.
    equivalent: where the better control reaches what the arm does; None without a curve that rises.
    """

    differences: Mapping[Control, Difference]
    better: Control | None = None
    equivalent: Equivalent | None = None

    @property
    def gain(self) -> Difference | None:
        """Over the better control."""
        return None if self.better is None else self.differences[self.better]


@dataclass(frozen=True)
class Gain:
    """An arm with what it gains, in points of the score and in test loss (more is better in both).

    A control has no gain, and no difference to itself; random pruning with another draw has one to random pruning.
    """

    arm: Arm
    score: Beside
    loss: Beside


def gains(arms: Sequence[Arm], alone: bool = False) -> list[Gain]:
    """Of the arms of a stage that have results, in their order.

    Args:
        alone: spread is that of an arm and the points of the control it is compared with (of one point: the paired t
            test). Otherwise it is pooled over the arms of a recipe.
    """
    made = []
    for base in dict.fromkeys(arm.base for arm in arms):
        here = [arm for arm in arms if arm.base == base and arm.entries]
        of_score, of_loss = (None if alone else spread(here, measure) for measure in ("scores", "losses"))
        for arm in here:
            score = beside(arm.cost, arm.scores, _curves(arm, here, "scores"), of_score)
            loss = beside(arm.cost, arm.losses, _curves(arm, here, "losses"), of_loss)
            made.append(Gain(arm, score, loss))
    return made


def spread(here: Sequence[Arm], measure: str) -> Residual | None:
    """Of scores or losses, pooled over the arms of a recipe and stage; None if there is nothing to estimate it from."""
    found = {arm.name: getattr(arm, measure) for arm in here if getattr(arm, measure)}
    return residual(found, {arm.name: arm.family for arm in here}) if found else None


def _curves(arm: Arm, others: Sequence[Arm], measure: str) -> dict[Control, list[Point]]:
    """The controls that the arm is compared with, from the arms of its recipe."""
    if arm.role == "full":
        return {}
    family = [other for other in others if other.family == arm.family and getattr(other, measure)]
    found: dict[Control, list[Point]] = {}
    for control in CONTROLS:
        # Full data are the upper end of every curve, but no control by themselves.
        if control != arm.role and any(other.role == control for other in family):
            points = [other for other in family if other.role in (control, "full")]
            found[control] = [Point(other.cost, getattr(other, measure)) for other in points]
    return found


def beside(cost: float, scores: Scores, curves: Curves, pooled: Residual | None) -> Beside:
    """A method of that cost beside its controls, and what it gains over the better one. pooled: None: see `gains`."""
    reaching: dict[Control, tuple[list[Point], list[float]]] = {}
    seeds = set(scores)
    for control, points in curves.items():
        ordered = sorted(points, key=lambda point: point.cost)
        weights = weights_at(cost, [point.cost for point in ordered])
        if weights is not None:
            reaching[control] = ordered, weights
            used = [point.scores for point, weight in zip(ordered, weights, strict=True) if weight]
            seeds = {seed for seed in seeds if all(seed in each for each in used)}
    mine = {seed: score for seed, score in scores.items() if seed in seeds}
    differences = {}
    for control, (points, weights) in reaching.items():
        used = [point.scores for point, weight in zip(points, weights, strict=True) if weight]
        own = pooled or residual(dict(enumerate([mine, *used])))
        if (found := difference_at(cost, mine, points, own)) is not None:
            differences[control] = found
    if len(differences) < len(CONTROLS):
        return Beside(differences)
    # The method's own mean is the same in both, so the smaller difference is to the larger control.
    better = min(differences, key=lambda control: differences[control].mean)
    return Beside(differences, better, equivalent(differences[better], mine, *reaching[better]))


def equivalent(
    gain: Difference, scores: Scores, points: Sequence[Point], weights: Sequence[float]
) -> Equivalent | None:
    """The cost at which a curve lies higher by the gain than at the method's own cost.

    The interval goes through the same curve, so that it leaves out the own cost where the gain's leaves out zero. None
    where the control scores no more with all data than at the own cost: no cost is worth more there.

    Args:
        points: of the curve, sorted by cost.
        weights: with which they give the curve's value at the method's cost.
    """
    import numpy as np

    shared = [seed for seed in scores if all(seed in point.scores for point in points)]
    if len(points) < FEWEST_POINTS or not shared:
        return None
    curve_K = np.array([statistics.fmean(point.scores[seed] for seed in shared) for point in points])
    costs = [point.cost for point in points]
    here = float(curve_K @ np.array(weights))
    if curve_K[-1] <= here:
        return None
    steps = [gain.mean] if gain.low is None or gain.high is None else [gain.mean, gain.low, gain.high]
    reached = reached_at(here + np.array(steps), np.tile(curve_K, (len(steps), 1)), costs)
    low, high = (float(reached[1]), float(reached[2])) if len(steps) > 1 else (None, None)
    return Equivalent(float(reached[0]), low, high, (costs[0], costs[-1]))


def of_ladders(found: Sequence[Gain]) -> dict[str, list[Gain]]:
    """The methods on rungs, by ladder; those that have a gain."""
    ladders: dict[str, list[Gain]] = {}
    for each in found:
        if each.arm.role == "method" and each.arm.rung is not None and each.score.gain is not None:
            ladders.setdefault(each.arm.rung[0], []).append(each)
    return {ladder: ladders[ladder] for ladder in sorted(ladders)}


def key(arm: Arm) -> tuple[str, str, str]:
    """What tells arms of a study apart."""
    return arm.stage, arm.base, arm.name
