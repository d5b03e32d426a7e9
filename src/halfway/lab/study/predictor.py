"""Where do hard samples begin to pay? One predictor, named before the results: the share of small losses.

On each rung it is the share of plain losses below 0.1 in the last round of random pruning (of full data, where there is
no random pruning). A threshold is chosen on one ladder and judged on another: the rule trains with the method where the
share reaches the threshold, and with the better control elsewhere, where its gain is zero by definition. The threshold
is that with which the rule gains most on the ladder it is chosen on.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..comparison.paired import Difference, with_interval
from .arms import Arm
from .gains import Gain, of_ladders

HARD = ("last_loss", "last_loss_hard", "last_loss_proportional", "early_exit")
_USUAL_COST = 0.5  # of the random pruning that the share is taken from


@dataclass(frozen=True)
class Rung:
    """A rung of a ladder: the predictor there, and what a method gains there."""

    base: str
    share: float
    gain: Difference


@dataclass(frozen=True)
class Judgement:
    """A rule, chosen on one ladder and judged on another.

    between: the shares that the threshold lies between; (-inf, s): below all of the ladder's; (s, inf): above.
    rule, always: mean gain over the rungs of the other ladder, of the rule and of the method without a rule.
    best: the mean gain of a rule that knew the signs.
    right: on how many rungs the rule goes by the sign of the gain.
    clear: on how many the gain's interval leaves out zero, so that there is a sign to be right about.
    """

    method: str
    chosen_on: str
    judged_on: str
    between: tuple[float, float]
    rule: Difference
    always: Difference
    best: float
    right: int
    clear: int
    rungs: int

    @property
    def threshold(self) -> float:
        return threshold(self.between)


def share(base: str, arms: Sequence[Arm]) -> float | None:
    """The predictor on a recipe. arms: of a stage."""
    here = [arm for arm in arms if arm.base == base and arm.entries]
    random = sorted((arm for arm in here if arm.role == "random"), key=lambda arm: abs(arm.cost - _USUAL_COST))
    candidates = [*random, *(arm for arm in here if arm.role == "full")]
    return next((arm.small_losses for arm in candidates if arm.small_losses is not None), None)


def rungs(found: Sequence[Gain], arms: Sequence[Arm]) -> dict[str, dict[str, list[Rung]]]:
    """Of the methods that prefer hard samples: by arm and ladder, sorted by share."""
    table: dict[str, dict[str, list[Rung]]] = {}
    for ladder, members in of_ladders(found).items():
        for each in members:
            at, gain = share(each.arm.base, arms), each.score.gain
            if each.arm.recipe.method in HARD and at is not None and gain is not None:
                by_ladder = table.setdefault(each.arm.name, {})
                by_ladder.setdefault(ladder, []).append(Rung(each.arm.base, at, gain))
    for by_ladder in table.values():
        for members_ in by_ladder.values():
            members_.sort(key=lambda rung: rung.share)
    return table


def choose(ladder: Sequence[Rung]) -> tuple[float, float]:
    """The shares between which the best threshold lies. Of equally good ones the highest: the method is used less."""
    shares = [-math.inf, *(rung.share for rung in ladder), math.inf]
    best, between = -math.inf, (-math.inf, math.inf)
    for k in range(len(ladder) + 1):
        total = sum(rung.gain.mean for rung in ladder[k:])
        if shares[k] < shares[k + 1] and total >= best:
            best, between = total, (shares[k], shares[k + 1])
    return between


def threshold(between: tuple[float, float]) -> float:
    """The middle; the lowest share of the ladder if the method gains on all of it, and infinity if on none: the rule
    does not use the method where nothing was seen that speaks for it."""
    low, high = between
    return high if low == -math.inf else (low + high) / 2


def judge(method: str, by_ladder: dict[str, list[Rung]]) -> list[Judgement]:
    """Every ladder's threshold on every other ladder."""
    made = []
    for chosen_on in by_ladder:
        for judged_on, ladder in by_ladder.items():
            if judged_on == chosen_on:
                continue
            between = choose(by_ladder[chosen_on])
            used = [rung.share >= threshold(between) for rung in ladder]
            made.append(
                Judgement(
                    method,
                    chosen_on,
                    judged_on,
                    between,
                    rule=_mean([rung.gain for rung, yes in zip(ladder, used, strict=True) if yes], len(ladder)),
                    always=_mean([rung.gain for rung in ladder], len(ladder)),
                    best=statistics.fmean(max(0.0, rung.gain.mean) for rung in ladder),
                    right=sum((rung.gain.mean > 0) == yes for rung, yes in zip(ladder, used, strict=True)),
                    clear=sum(rung.gain.told_apart for rung in ladder),
                    rungs=len(ladder),
                )
            )
    return made


def _mean(used: Sequence[Difference], rungs: int) -> Difference:
    """The mean gain over rungs, where those not used gain nothing. Rungs have runs of their own: errors are
    independent. The degrees of freedom are the fewest of any rung."""
    mean = sum(d.mean for d in used) / rungs
    n = sum(d.n for d in used)
    errors = [d.error for d in used if d.error is not None]
    dfs = [d.df for d in used if d.df is not None]
    if not used or len(errors) < len(used) or len(dfs) < len(used):
        return Difference(mean, None, None, None, n)
    error = math.sqrt(sum(e**2 for e in errors)) / rungs
    return with_interval(mean, error, n, min(dfs))
