"""Gains over the better control: closed forms, slow loops, and what belongs to which control."""

from __future__ import annotations

import statistics
from math import exp, log
from typing import Any

import pytest

pytest.importorskip("scipy")
pytest.importorskip("yaml")

import numpy as np
from scipy.stats import ttest_rel

from halfway.lab.comparison.curves import Point
from halfway.lab.comparison.paired import Residual
from halfway.lab.study import plan
from halfway.lab.study.arms import Arm, arms
from halfway.lab.study.gains import Gain, beside, gains

from .invented import CONTROLS, PFB, PFB_COST, cost_of, entries, entry, on_the_curves, stage

POOLED = Residual(0.5, 8)
COSTS = (0.3, 0.5, 0.7, 1.0)
RUNG = "ladder-c16"


def curve(slope: float, seeds: int = 3) -> list[Point]:
    """A control whose score is linear in the logarithm of the cost."""
    return [Point(c, {seed: 80 + slope * log(c) + 0.1 * seed for seed in range(seeds)}) for c in COSTS]


def scores(mean: float, seeds: int = 3) -> dict[int, float]:
    return {seed: mean + 0.1 * seed for seed in range(seeds)}


def collected(arms_: dict[str, Any], score: Any = on_the_curves, spread: float = 0.3, **more: Any) -> list[Arm]:
    content = stage([RUNG], arms_, **more)
    return arms(plan.runs("confirm", content, "data"), entries({"confirm": content}, score, spread))


def named(found: list[Gain], name: str) -> Gain:
    return next(each for each in found if each.arm.name == name)


# ------------------------------------------------------------------ one method


@pytest.mark.parametrize(("random", "shorter", "better"), [(8, 10, "random"), (10, 8, "shorter")])
@pytest.mark.parametrize("cost", [0.3, 0.42, 0.62, 0.9])
def test_the_better_control_is_the_higher_curve_at_the_own_cost(
    random: float, shorter: float, better: str, cost: float
) -> None:
    mine = scores(80 + 8 * log(cost) + 0.6)
    found = beside(cost, mine, {"random": curve(random), "shorter": curve(shorter)}, POOLED)
    assert found.better == better
    assert found.gain is not None
    assert found.gain.mean == pytest.approx(0.6)
    assert found.differences["random"].mean == pytest.approx(0.6 + (8 - random) * log(cost))
    assert found.differences["shorter"].mean == pytest.approx(0.6 + (8 - shorter) * log(cost))


def test_the_equivalent_cost_and_its_interval_in_closed_form() -> None:
    found = beside(0.5, scores(80 + 8 * log(0.5) + 0.6), {"random": curve(8), "shorter": curve(10)}, POOLED)
    half = 2.306004135 * 0.5 * (2 / 3) ** 0.5  # the t quantile of 8 degrees of freedom
    assert found.equivalent is not None
    assert found.equivalent.cost == pytest.approx(0.5 * exp(0.6 / 8))
    assert found.equivalent.low == pytest.approx(0.5 * exp((0.6 - half) / 8))
    assert found.equivalent.high == pytest.approx(0.5 * exp((0.6 + half) / 8))


@pytest.mark.parametrize("gain", [-0.8, -0.2, 0.2, 0.8, 1.5])
def test_a_gain_and_its_equivalent_cost_never_contradict_each_other(gain: float) -> None:
    found = beside(0.6, scores(80 + 8 * log(0.6) + gain), {"random": curve(8), "shorter": curve(10)}, POOLED)
    assert found.gain is not None
    assert found.gain.low is not None
    assert found.gain.high is not None
    where = found.equivalent
    assert where is not None
    assert where.low is not None
    assert where.high is not None
    assert (found.gain.low > 0) == (where.low > 0.6)
    assert (found.gain.high < 0) == (where.high < 0.6)


def test_beyond_the_ends_of_the_curve_the_sign_says_so() -> None:
    curves = {"random": curve(8), "shorter": curve(10)}
    high, low = (beside(0.5, scores(score), curves, POOLED).equivalent for score in (95, 20))
    assert high is not None
    assert low is not None
    assert (high.cost, str(high)[:2]) == (1.0, "≥ ")
    assert (low.cost, str(low)[:2]) == (0.3, "≤ ")


def test_without_one_of_the_controls_there_is_no_gain() -> None:
    found = beside(0.5, scores(76), {"random": curve(8)}, POOLED)
    assert found.better is None
    assert found.gain is None
    assert set(found.differences) == {"random"}
    beyond = beside(0.2, scores(76), {"random": curve(8), "shorter": curve(10)}, POOLED)
    assert not beyond.differences, "curves are not extended"


def test_where_the_control_falls_with_the_cost_no_cost_is_equivalent() -> None:
    falling = {"random": curve(-1), "shorter": curve(-2)}
    found = beside(0.5, scores(80), falling, POOLED)
    assert found.gain is not None
    assert found.equivalent is None
    assert beside(0.5, scores(80), {"random": curve(1), "shorter": curve(2)}, POOLED).equivalent is not None


def test_both_differences_are_over_the_seeds_that_all_have() -> None:
    few = [
        Point(c, {seed: s for seed, s in p.scores.items() if seed < 2}) for c, p in zip(COSTS, curve(10), strict=True)
    ]
    found = beside(0.5, {0: 75.0, 1: 76.0, 2: 99.0}, {"random": curve(8), "shorter": few}, POOLED)
    assert {d.n for d in found.differences.values()} == {2}
    assert found.gain is not None
    assert found.gain.mean == pytest.approx(75.5 - (80 + 8 * log(0.5) + 0.05)), "the third seed does not count"


# ---------------------------------------------------------------- a whole stage


def test_a_slow_reference_gives_the_same_differences_and_the_same_error() -> None:
    """Straight loops over seeds for the means, least squares over indicator columns for the residual."""
    members = collected({**CONTROLS, **PFB}, lambda run, cost: on_the_curves(run, cost) - (run.arm == "pfb"))
    found = named(gains(members), "pfb").score
    by_name = {arm.name: arm.scores for arm in members}
    right = log(PFB_COST / 0.5) / log(0.7 / 0.5)
    for control in ("random", "shorter"):
        each = [
            by_name["pfb"][s] - (1 - right) * by_name[f"{control} 0.5"][s] - right * by_name[f"{control} 0.3"][s]
            for s in range(3)
        ]
        assert found.differences[control].mean == pytest.approx(statistics.fmean(each))
    names = list(by_name)
    table = np.array([[by_name[name][seed] for seed in range(3)] for name in names])
    left = table - table.mean(1, keepdims=True) - table.mean(0, keepdims=True) + table.mean()
    df = (len(names) - 1) * 2
    deviation = ((left**2).sum() / df) ** 0.5
    assert found.gain is not None
    assert found.gain.df == df
    assert found.gain.error == pytest.approx(deviation * ((1 + right**2 + (1 - right) ** 2) / 3) ** 0.5)


def test_alone_an_arm_and_a_control_are_the_paired_t_test() -> None:
    half = {"half": {"method": "last_loss", "prune_ratio": 0.5}}
    members = collected({**CONTROLS, **half}, seeds=range(6))
    scores = {arm.name: arm.scores for arm in members}
    (found, pooled) = (named(gains(members, alone), "half").score.differences["random"] for alone in (True, False))
    expected = ttest_rel(list(scores["half"].values()), list(scores["random 0.5"].values())).confidence_interval()
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.df == 5
    assert pooled.low != found.low


def test_a_lower_test_loss_is_a_gain() -> None:
    content = stage([RUNG], {**CONTROLS, **PFB})
    lines = []
    for run in plan.runs("confirm", content, "data"):
        loss = 1.0 - 0.4 * log(cost_of(run)) - (0.25 if run.arm == "pfb" else 0) + 0.01 * run.seed
        lines.append(entry(run, on_the_curves(run, cost_of(run)), loss))
    found = named(gains(arms(plan.runs("confirm", content, "data"), lines)), "pfb").loss
    assert found.gain is not None
    assert found.gain.mean == pytest.approx(0.25)


def test_each_arm_has_its_role() -> None:
    extra = {
        "in a window": {"method": "random", "prune_ratio": 0.5, "window": [2, 14]},
        "even in a window": {"method": "random_even", "prune_ratio": 0.4, "window": [2, 14]},
        "rs2": {"method": "rs2", "prune_ratio": 0.5},
    }
    members = {arm.name: arm for arm in collected({**CONTROLS, **PFB, **extra}, seeds=(0,))}
    roles = {name: arm.role for name, arm in members.items()}
    assert roles["full"] == "full"
    assert [roles[f"{control} 0.{k}"] for control in ("random", "shorter") for k in (3, 5, 7)] == [
        *["random"] * 3,
        *["shorter"] * 3,
    ]
    assert roles["random 0.5 again"] == "again"
    assert (roles["pfb"], roles["in a window"], roles["even in a window"]) == ("method", "method", "random")
    assert members["rs2"].before_epoch
    assert not members["pfb"].before_epoch
    assert members["pfb"].rung == ("C", 16)


def test_the_recipe_of_a_hundred_classes_is_no_rung() -> None:
    stages = {"a": stage(["ladder-cifar100"], CONTROLS, seeds=(0,))}
    assert all(arm.rung is None for arm in arms(plan.runs("a", stages["a"], "data"), []))


def test_controls_are_compared_with_the_other_control_and_a_second_draw_with_the_first() -> None:
    found = gains(collected({**CONTROLS, **PFB}))
    assert not named(found, "full").score.differences
    assert set(named(found, "random 0.5").score.differences) == {"shorter"}
    assert set(named(found, "shorter 0.7").score.differences) == {"random"}
    again, first = named(found, "random 0.5 again"), named(found, "random 0.5").arm.scores
    each = [again.arm.scores[seed] - first[seed] for seed in range(3)]
    assert again.score.differences["random"].mean == pytest.approx(statistics.fmean(each))


def test_another_learning_rate_has_controls_of_its_own() -> None:
    twice = {"times": {"optimizer.lr": 2}}
    hot = {f"{name}, hot": {"method": "full", **arm, **twice} for name, arm in {**CONTROLS, **PFB}.items()}

    def score(run: plan.Run, cost: float) -> float:
        return on_the_curves(run, cost) - 10 * ("hot" in run.arm) + 0.5 * ("pfb" in run.arm)

    found = gains(collected({**CONTROLS, **PFB, **hot}, score, spread=0.0))
    for name in ("pfb", "pfb, hot"):
        gain = named(found, name).score.gain
        assert gain is not None
        assert gain.mean == pytest.approx(0.5)
    alone = gains(collected({**CONTROLS, "pfb, hot": hot["pfb, hot"]}))
    assert not named(alone, "pfb, hot").score.differences, "no control has its learning rate"


def test_a_run_that_an_earlier_stage_made_counts_in_a_later_one() -> None:
    stages = {"first": stage([RUNG], CONTROLS), "second": stage([RUNG], {**CONTROLS, **PFB})}
    lines = {line["key"]: line for line in reversed(entries(stages, on_the_curves))}
    assert sum(line["stage"] == "first" for line in lines.values()) == 24
    members = arms(plan.runs("second", stages["second"], "data"), list(lines.values()))
    assert not any(arm.missing for arm in members)
    assert {arm.stage for arm in members} == {"second"}


def test_arms_without_results_are_left_out_and_say_which_seeds_they_miss() -> None:
    content = stage([RUNG], {**CONTROLS, **PFB})
    runs = plan.runs("confirm", content, "data")
    lines = [
        line
        for line in entries({"confirm": content}, on_the_curves)
        if line["arm"] != "pfb" and not (line["arm"] == "shorter 0.5" and line["seed"] == 1)
    ]
    members = arms(runs, lines)
    assert {arm.name: arm.missing for arm in members if arm.missing} == {"shorter 0.5": [1], "pfb": [0, 1, 2]}
    found = gains(members)
    assert "pfb" not in {each.arm.name for each in found}
    assert named(found, "random 0.5").score.differences["shorter"].n == 2
    assert gains(arms(runs, [])) == []
