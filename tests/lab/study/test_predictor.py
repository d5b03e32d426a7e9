"""The predictor: thresholds by trying them all, and what the rule says where nothing was seen."""

from __future__ import annotations

import math
import random

import pytest

pytest.importorskip("scipy")
pytest.importorskip("yaml")

from halfway.lab.comparison.paired import Difference
from halfway.lab.study import plan
from halfway.lab.study.arms import arms
from halfway.lab.study.gains import gains
from halfway.lab.study.predictor import Rung, choose, judge, rungs, share, threshold

from .invented import CONTROLS, PFB, cost_of, entry, on_the_curves, stage

HARD = {"hard": {"method": "last_loss_hard", "prune_ratio": 0.5}}
SHARES = {"ladder-c4": 0.02, "ladder-c16": 0.2, "ladder-c64": 0.8, "ladder-f8": 0.4, "ladder-f128": 0.9}


def rung(at: float, mean: float, error: float = 0.2) -> Rung:
    return Rung("x", at, Difference(mean, error, mean - 2 * error, mean + 2 * error, 5, 20))


def test_the_chosen_threshold_is_the_best_of_all_that_can_be_tried() -> None:
    draw = random.Random(0)
    for _ in range(200):
        ladder = sorted((rung(draw.randrange(100) / 100, draw.gauss(0, 1)) for _ in range(4)), key=lambda r: r.share)

        def gained(at: float, ladder: list[Rung] = ladder) -> float:
            return sum(r.gain.mean for r in ladder if r.share >= at)

        best = max(gained(k / 1000) for k in range(1002))
        assert gained(threshold(choose(ladder))) == pytest.approx(best, abs=1e-9)


def test_the_threshold_lies_in_the_middle_of_two_shares_and_never_where_nothing_was_seen() -> None:
    rising = [rung(0.1, -2.0), rung(0.3, -0.5), rung(0.7, 1.0)]
    assert choose(rising) == (0.3, 0.7)
    assert threshold(choose(rising)) == pytest.approx(0.5)
    always = [rung(0.4, 0.5), rung(0.9, 0.7)]
    assert threshold(choose(always)) == 0.4, "the lowest share at which it was seen to pay"
    never = [rung(0.4, -0.5), rung(0.9, -0.7)]
    assert threshold(choose(never)) == math.inf
    assert threshold(choose([rung(0.4, 0.0)])) == math.inf, "of equals the one that uses the method less"


def test_equal_shares_are_not_told_apart() -> None:
    assert choose([rung(0.3, -1.0), rung(0.3, 0.4)]) == (0.3, math.inf)


def test_a_threshold_is_judged_on_the_other_ladder_both_ways() -> None:
    ladders = {
        "C": [rung(0.1, -2.0), rung(0.3, -0.5), rung(0.7, 1.0)],
        "F": [rung(0.4, -0.3), rung(0.6, 0.9), rung(0.95, 0.6)],
    }
    first, second = judge("hard", ladders)
    assert (first.chosen_on, first.judged_on, first.threshold) == ("C", "F", pytest.approx(0.5))
    assert first.rule.mean == pytest.approx((0.9 + 0.6) / 3)
    assert first.rule.error == pytest.approx((0.2**2 + 0.2**2) ** 0.5 / 3)
    assert first.rule.high == pytest.approx(first.rule.mean + 2.085963447 * first.rule.error), "t, 20 degrees"
    assert first.always.mean == pytest.approx((-0.3 + 0.9 + 0.6) / 3)
    assert first.best == pytest.approx((0.9 + 0.6) / 3)
    assert (first.right, first.rungs, first.clear) == (3, 3, 2), "-0.3 +- 0.4 has no clear sign"
    assert (second.chosen_on, second.judged_on, second.threshold) == ("F", "C", pytest.approx(0.5))
    assert second.rule.mean == pytest.approx(1 / 3)


def test_a_rule_that_never_uses_the_method_gains_nothing_and_has_no_interval() -> None:
    judged = judge("hard", {"C": [rung(0.1, -1.0)], "F": [rung(0.5, 0.4)]})[0]
    assert (judged.rule.mean, judged.rule.low) == (0.0, None)
    assert judged.right == 0


def test_shares_come_from_random_pruning_and_only_methods_that_prefer_hard_samples_count() -> None:
    content = stage(list(SHARES), {**CONTROLS, **PFB, **HARD})
    runs = plan.runs("confirm", content, "data")
    lines = []
    for run in runs:
        small = SHARES[run.base] if run.arm == "random 0.5" else 0.5
        lines.append(entry(run, on_the_curves(run, cost_of(run)) + 0.1 * run.seed, small=small))
    members = arms(runs, lines)
    assert {base: share(base, members) for base in SHARES} == pytest.approx(SHARES)
    found = rungs(gains(members), members)
    assert list(found) == ["hard"]
    assert {ladder: [r.base for r in each] for ladder, each in found["hard"].items()} == {
        "C": ["ladder-c4", "ladder-c16", "ladder-c64"],
        "F": ["ladder-f8", "ladder-f128"],
    }
    without = [arm for arm in members if arm.role != "random"]
    assert share("ladder-c4", without) == pytest.approx(0.5), "of full data, where there is no random pruning"
    assert share("ladder-c4", []) is None
