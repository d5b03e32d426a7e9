"""Control curves: closed forms of what a control reaches at a cost, and at which cost it reaches a score."""

from __future__ import annotations

import json
from math import log
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")
pytest.importorskip("yaml")

import numpy as np

from halfway.lab.comparison import results as recorded
from halfway.lab.comparison import table
from halfway.lab.comparison.curves import Point, standing, weights_at
from halfway.lab.comparison.paired import Residual
from halfway.lab.comparison.results import summarise
from halfway.lab.comparison.trials import Group, group_of
from tests.lab.comparison.test_table import ABOUT_CONTROLS, result

POOLED = Residual(0.5, 8)
NOISE = (0.3, -0.1, -0.2)


def logarithmic(cost: float) -> float:
    return 90 + 10 * log(cost)


def point(cost: float, score: float | None = None) -> Point:
    score = logarithmic(cost) if score is None else score
    return Point(cost, {seed: score + noise for seed, noise in enumerate(NOISE)})


CURVE = [point(1.0), point(0.4), point(0.7)]


@pytest.mark.parametrize("cost", [0.4, 0.41, 0.55, 0.7, 0.9, 1.0])
def test_a_score_that_grows_with_the_logarithm_of_the_cost_is_met_exactly(cost: float) -> None:
    found = standing(cost, point(cost, logarithmic(cost) + 1.5).scores, CURVE, POOLED)
    assert found is not None
    assert found.difference.mean == pytest.approx(1.5)
    assert found.bootstrap == pytest.approx((1.5, 1.5)), "the noise of a seed is shared, and cancels"
    assert found.equivalent_cost is not None
    reached = min(1.0, cost * float(np.exp(0.15)))
    assert found.equivalent_cost[0] == pytest.approx(reached)


def test_the_interval_is_that_of_a_mean_of_the_two_neighbours() -> None:
    found = standing(0.55, point(0.55).scores, CURVE, POOLED)
    assert found is not None
    right = log(0.55 / 0.4) / log(0.7 / 0.4)
    error = 0.5 * ((1 + right**2 + (1 - right) ** 2) / 3) ** 0.5
    assert found.difference.error == pytest.approx(error)
    assert found.difference.high == pytest.approx(2.306004135 * error), "the t quantile of 8 degrees of freedom"


def test_a_curve_is_not_extended_beyond_its_ends() -> None:
    assert weights_at(0.38, [0.4, 0.7, 1.0]) is None
    assert weights_at(0.395, [0.4, 0.7, 1.0]) == [1.0, 0.0, 0.0], "1 % counts as the same cost"
    assert weights_at(0.5, []) is None


def test_two_points_are_no_curve() -> None:
    assert weights_at(0.8, [0.6, 1.0]) is None
    assert weights_at(0.608, [0.6, 1.0]) == [1.0, 0.0]
    found = standing(0.6, point(0.6, 80.0).scores, [point(0.6, 79.0), point(1.0)], POOLED)
    assert found is not None
    assert found.difference.mean == pytest.approx(1.0)
    assert found.equivalent_cost is None
    assert found.equivalent == ""


def test_beyond_the_curve_the_equivalent_cost_is_its_end_and_says_so() -> None:
    high = standing(0.7, point(0.7, 99.0).scores, CURVE, POOLED)
    low = standing(0.7, point(0.7, 10.0).scores, CURVE, POOLED)
    assert high is not None
    assert low is not None
    assert (high.equivalent, low.equivalent) == ("≥ 1.000 [1.000, 1.000]", "≤ 0.400 [0.400, 0.400]")


def test_where_a_curve_falls_the_first_cost_counts() -> None:
    bumpy = [point(0.4, 80.0), point(0.6, 90.0), point(0.8, 85.0), point(1.0, 95.0)]
    found = standing(0.8, point(0.8, 90.0).scores, bumpy, POOLED)
    assert found is not None
    assert found.equivalent_cost is not None
    assert found.equivalent_cost[0] == pytest.approx(0.6)


def test_the_bootstrap_draws_seeds_and_always_the_same() -> None:
    random = np.random.default_rng(0)
    points = [Point(c, dict(enumerate((logarithmic(c) + random.normal(0, 1, 6)).tolist()))) for c in (0.4, 0.7, 1.0)]
    mine = dict(enumerate((logarithmic(0.7) + 1 + random.normal(0, 1, 6)).tolist()))
    found, again = (standing(0.7, mine, points, POOLED) for _ in range(2))
    assert found == again
    assert found is not None
    assert found.bootstrap is not None
    differences = np.array([mine[s] - points[1].scores[s] for s in range(6)])
    slow = [differences[random.integers(6, size=6)].mean() for _ in range(5000)]
    assert found.bootstrap == pytest.approx(np.quantile(slow, [0.025, 0.975]), abs=0.08)
    assert found.equivalent_cost is not None
    cost, low, high = found.equivalent_cost
    assert 0.4 <= low < cost < high <= 1.0


def test_seeds_that_are_missing_somewhere_are_left_out() -> None:
    points = [point(0.4), Point(0.7, {0: 1.0, 1: 2.0}), point(1.0)]
    found = standing(0.7, {0: 2.0, 1: 3.0, 2: 50.0, 9: 7.0}, points, POOLED)
    assert found is not None
    assert (found.difference.mean, found.difference.n) == (1.0, 2)
    assert standing(0.7, {9: 7.0}, points, POOLED) is None


# ------------------------------------------------------------------- comparison


def comparison() -> dict[Group, Any]:
    """Made-up runs of 100 steps of 10: PFB at cost 0.84, beside curves of three points."""

    def runs(method: str, ratio: float, score: float, **last: Any) -> dict[int, Any]:
        noises = NOISE[::-1] if method == "full" else NOISE
        return {seed: result(method, ratio, seed, score + noise, **last) for seed, noise in enumerate(noises)}

    def even(ratio: float, score: float) -> dict[int, Any]:
        return runs("random_even", ratio, score, pruned_steps=100)

    def spent(samples: int) -> dict[str, Any]:
        return {"pruned_steps": 0, "seen": samples, "retained": samples, "spent": float(samples)}

    return {
        group_of("full", None, {}): runs("full", 0.0, 90.0),
        group_of("random_even", 0.2, {}): even(0.2, 88.0),
        group_of("random_even", 0.5, {}): even(0.5, 80.0),
        group_of("shorter", 0.2, {}): runs("shorter", 0.2, 87.0, **spent(800)),
        group_of("shorter", 0.5, {}): runs("shorter", 0.5, 78.0, **spent(500)),
        group_of("pfb", 0.5, {}): runs("pfb", 0.5, 89.0),
        group_of("rs2", 0.5, {}): runs("rs2", 0.5, 85.0),
        group_of("infobatch", 0.5, {}): runs("infobatch", 0.5, 86.0),
    }


def test_every_method_stands_beside_its_controls_at_its_own_cost() -> None:
    rows = {row.group.label: row for row in summarise(comparison(), {})}
    assert rows["shorter, p = 0.5"].cost == pytest.approx(0.5), "of the steps that full data take"
    pfb = rows["pfb, p = 0.5"]
    assert pfb.cost == pytest.approx(0.84)
    share = log(0.84 / 0.8) / log(1 / 0.8)
    assert pfb.controls["random_even"].difference.mean == pytest.approx(89 - (88 + 2 * share))
    assert pfb.controls["shorter"].difference.mean == pytest.approx(89 - (87 + 3 * share))
    assert rows["infobatch, p = 0.5"].controls.keys() == {"rs2", "shorter"}, "it takes fewer steps"
    assert rows["infobatch, p = 0.5"].controls["rs2"].difference.mean == pytest.approx(1.0)
    assert rows["rs2, p = 0.5"].controls.keys() == {"random_even", "shorter"}
    assert not any(row.controls for label, row in rows.items() if label.startswith(("full", "random", "shorter")))


def test_curves_are_in_the_table_and_read_as_they_were_written(tmp_path: Path) -> None:
    results = comparison()
    rows = summarise(results, {})
    for text in (table.text(rows), table.markdown(rows, "x", next(iter(results.values()))[0].recipe, *_rest(results))):
        assert all(column in text for column in ABOUT_CONTROLS)
    recorded.write(tmp_path, rows, "x", results, {"steps": {}})
    read = recorded.read(tmp_path)
    assert read is not None
    assert read.rows == rows
    written = json.loads((tmp_path / "results.json").read_text())["rows"]
    (pfb,) = (row for row in written if row["label"] == "pfb, p = 0.5")
    assert pfb["controls"]["shorter"]["difference"]["df"] == 2 * 7


def _rest(results: dict[Group, Any]) -> tuple[Any, Any]:
    return next(iter(results.values()))[0].sessions[-1], {"steps": {}}
