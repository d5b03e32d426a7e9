"""The plot: points at the right places, and the same file from the same results."""

from __future__ import annotations

from math import log, log2
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")
pytest.importorskip("yaml")
pytest.importorskip("matplotlib")

from halfway.lab.study import plan
from halfway.lab.study.gains import of_ladders
from halfway.lab.study.picture import LOWEST, cost_marks, draw, gain_marks, stage_of
from halfway.lab.study.results import Study, collect

from .invented import CONTROLS, PFB, PFB_COST, cost_of, entry, on_the_curves, stage

ARMS = {**CONTROLS, **PFB, "hard": {"method": "last_loss_hard", "prune_ratio": 0.5}}
GAINS = {
    ("pfb", "ladder-c4"): -1.0,
    ("pfb", "ladder-c64"): 0.5,
    ("hard", "ladder-c4"): -9.0,
    ("hard", "ladder-c64"): 2.0,
}


def study(spread: float = 0.0, **stages: Any) -> Study:
    stages = stages or {"confirm": stage(["ladder-c64", "ladder-c4", "ladder-f8"], ARMS)}
    lines = []
    for name, content in stages.items():
        for run in plan.runs(name, content, "data"):
            wobble = spread * ((7 * len(run.arm) + 3 * run.seed) % 5 - 2)
            score = on_the_curves(run, cost_of(run)) + GAINS.get((run.arm, run.base), 0.0) + wobble
            lines.append(entry(run, score))
    return collect(stages, lines)


def test_points_stand_at_the_passes_with_the_gain_that_the_table_has() -> None:
    found = of_ladders(study().gains["confirm"])
    assert list(found) == ["C", "F"]
    marks = gain_marks(found["C"], ["pfb", "hard"])
    assert [round(mark.x) for mark in marks["pfb"]] == [log2(4), log2(64)], "from few passes to many"
    assert [mark.y for mark in marks["pfb"]] == pytest.approx([-1.0, 0.5])
    assert marks["pfb"][0].x != marks["hard"][0].x, "intervals stand side by side"


def test_a_gain_far_below_the_others_is_drawn_at_the_edge_and_says_so() -> None:
    marks = gain_marks(of_ladders(study().gains["confirm"])["C"], ["pfb", "hard"])
    assert [(mark.y, mark.beyond) for mark in marks["hard"]] == [(LOWEST, True), (pytest.approx(2.0), False)]


def test_costs_are_relative_to_the_own_cost_and_hollow_where_the_curve_ends() -> None:
    marks = cost_marks(of_ladders(study().gains["confirm"])["C"], ["pfb", "hard"])
    value = 80 + 8 * log(PFB_COST) + 0.5
    reached = 2.718281828459045 ** ((value - 80) / 8)
    assert marks["pfb"][1].y == pytest.approx(reached / PFB_COST)
    assert not marks["pfb"][1].beyond
    assert (marks["hard"][0].y, marks["hard"][0].beyond) == (pytest.approx(0.3 / 0.5), True)


def test_intervals_are_those_of_the_gains() -> None:
    found = of_ladders(study(spread=0.1).gains["confirm"])["F"]
    marks = gain_marks(found, ["pfb", "hard"])
    for each in found:
        gain, (mark,) = each.score.gain, marks[each.arm.name]
        assert gain is not None
        assert (mark.low, mark.high) == (gain.low, gain.high)
        assert mark.low < mark.y < mark.high


def test_the_stage_with_a_primary_family_is_shown_else_that_with_most_gains() -> None:
    one, two = ["ladder-c4"], ["ladder-c4", "ladder-c16"]
    plain = study(a=stage(one, ARMS), b=stage(two, ARMS), c=stage(["tiny-cifar10"], ARMS))
    assert stage_of(plain, ["a", "b", "c"]) == "b"
    assert stage_of(plain, ["c"]) is None, "no ladder"
    primary = study(a=stage(one, ARMS, primary=["pfb"]), b=stage(two, ARMS))
    assert stage_of(primary, ["a", "b"]) == "a"
    assert stage_of(collect({"a": stage(one, ARMS)}, []), ["a"]) is None


def test_the_same_results_make_the_same_file_on_a_white_ground(tmp_path: Path) -> None:
    first, second, picture = tmp_path / "a.svg", tmp_path / "b.svg", tmp_path / "c.png"
    draw(study(spread=0.1), "confirm", [first, picture])
    draw(study(spread=0.1), "confirm", [second])
    assert first.read_bytes() == second.read_bytes()
    assert "fill: #ffffff" in first.read_text()[:2500]
    assert picture.stat().st_size > 10_000


def test_one_ladder_with_one_rung_and_many_methods_can_be_drawn(tmp_path: Path) -> None:
    many = {f"pfb {k}": {"method": "pfb", "prune_ratio": 0.5, "density.noise": 0.01 * (k + 1)} for k in range(15)}
    draw(study(screen=stage(["ladder-c16"], {**CONTROLS, **many})), "screen", [tmp_path / "a.svg"])
    assert (tmp_path / "a.svg").exists()
