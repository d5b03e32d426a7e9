"""The numbers of a comparison: paired differences against scipy's test, costs by hand, and no groundless claim."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")
pytest.importorskip("scipy")
pytest.importorskip("numpy")

import numpy as np
from scipy import stats

from halfway.lab.comparison import results as recorded
from halfway.lab.comparison import table
from halfway.lab.comparison.results import Row, summarise
from halfway.lab.comparison.trials import Group, Trial, group_of
from halfway.lab.comparison.verdict import reading
from halfway.lab.recipes.reading import load
from halfway.lab.recipes.schema import OF_A_RUN, Recipe, from_dict
from halfway.lab.training.run_folder import RunFolder
from halfway.lab.training.run_result import RunResult

SESSION: dict[str, Any] = {
    "command": "halfway train x",
    "steps": 100,
    "data": "CIFAR-10: 10,000 of 50,000 training images, 10,000 test images",
    "date": "2024-05-06",
    "versions": {"halfway": "0.1.0", "torch": "9.8.7"},
    "machine": {"cpu": "Imaginary CPU", "cores": 3, "device": "cpu"},
    "threads": 2,
}
RECIPE = load("tiny-cifar10")
RESULTS = Path(__file__).parents[3] / "results"
ABOUT_CONTROLS = ("vs random, no window", "vs shorter", "vs rs2", "equivalent cost")
ABOUT_PROXIES = ("keep", "FLOPs with proxy")
SHARE = 0.2  # F/T of the made-up runs: the shallow forward relative to a whole step


def result(method: str, ratio: float, seed: int, score: float, pruned_steps: int = 40, **last: Any) -> RunResult:
    """A run of 100 steps of 10 samples, `pruned_steps` of them pruned; one round of 60 s and one of 40 s."""
    settings = {"method": method, "prune_ratio": ratio, "seed": seed, "batch_size": 10}
    recipe = RECIPE.with_settings(settings)
    if not recipe.prunes:
        pruned_steps = 0
    pruned = round(10 * ratio) * pruned_steps
    spent = 1000 - pruned * (1 - (SHARE if method == "pfb" else 0))
    metrics: list[dict[str, Any]] = [
        {"step": 50, "seen": 500, "retained": 1, "spent": 1.0, "pruned_steps": 1, "seconds": 60.0, "waited": 6.0},
        {
            "step": 100,
            "seen": 1000,
            "retained": 1000 - pruned,
            "spent": spent,
            "pruned_steps": pruned_steps,
            "seconds": 40.0,
            "waited": 2.0,
            "score": score,
            **last,
        },
    ]
    return RunResult(Path("nowhere"), recipe, metrics, [SESSION], 100)


def compared(
    scores: dict[str, dict[int, float]], ratio: float = 0.5, over: dict[str, Any] | None = None
) -> dict[Group, dict[int, RunResult]]:
    """Results by group and seed from scores by method and seed."""
    return {
        group_of(method, ratio, over or {}): {seed: result(method, ratio, seed, s) for seed, s in by_seed.items()}
        for method, by_seed in scores.items()
    }


def seeds(values: list[float], first: int = 0) -> dict[int, float]:
    return dict(enumerate(values, first))


def row(rows: list[Row], method: str) -> Row:
    return next(r for r in rows if r.group.method == method)


SCORES = {
    "full": seeds([91.0, 92.5, 90.75]),
    "random": seeds([88.0, 89.0, 89.5]),
    "pfb": seeds([90.0, 91.25, 91.0]),
}


def half_an_interval() -> float:
    """By hand: rows and columns are taken out of the 3 x 3 scores, and (3 - 1) (3 - 1) degrees of freedom are left."""
    scores = np.array([list(by_seed.values()) for by_seed in SCORES.values()])
    left = scores - scores.mean(1, keepdims=True) - scores.mean(0, keepdims=True) + scores.mean()
    return float(stats.t.ppf(0.975, 4) * ((left**2).sum() / 4 * 2 / 3) ** 0.5)


HALF = half_an_interval()
TIMING: dict[str, Any] = {
    "steps": {
        "pfb, p = 0.5": {"median": 0.654, "q1": 0.612, "q3": 0.701, "rounds": 15},
        "random, p = 0.5": {"median": 0.532, "q1": 0.501, "q3": 0.557, "rounds": 15},
    },
    "threads": 2,
}


# ---------------------------------------------------------------- run results


def test_costs_of_a_run_that_prunes_in_part_of_it() -> None:
    # 40 of 100 steps prune 5 of 10: 200 of the 400 samples there. Each of them costs F/T = 0.2.
    pfb = result("pfb", 0.5, 0, 90.0)
    assert pfb.effective_ratio == pytest.approx((0.5, 0.2))
    assert pfb.flops == pytest.approx((0.5 + 0.5 * 0.2, (600 + 200 + 200 * 0.2) / 1000))
    random = result("random", 0.3, 0, 90.0, pruned_steps=75)
    assert random.effective_ratio == pytest.approx((0.3, 0.225))
    assert random.flops == pytest.approx((0.7, 1 - 0.225))
    assert (pfb.seconds, pfb.waited) == (100.0, 0.08)


@pytest.mark.parametrize(("method", "ratio"), [("full", 0.5), ("pfb", 0.0)])
def test_a_run_without_pruning_costs_what_full_training_does(method: str, ratio: float) -> None:
    run = result(method, ratio, 0, 90.0)
    assert run.method == "full"
    assert run.effective_ratio == (0.0, 0.0)
    assert run.flops == (1.0, 1.0)


def test_the_score_is_the_last_one_at_several_scales_if_there_is_one() -> None:
    assert result("pfb", 0.5, 0, 70.0).score == 70.0
    assert result("pfb", 0.5, 0, 70.0, multi_scale=71.5).score == 71.5


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    run = result("pfb", 0.5, 3, 90.0)
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match=r"not a run folder \(it has no config\.yaml\)"):
        RunResult.read(folder.path)
    folder.open(run.recipe, resume=False)
    assert not RunResult.read(folder.path).finished, "nothing is trained yet"
    folder.note_session({**SESSION, "steps": 7})
    folder.note_session(SESSION)
    folder.metrics.write_text(json.dumps(run.metrics[0]) + "\n")
    assert not RunResult.read(folder.path).finished
    folder.metrics.write_text("".join(json.dumps(m) + "\n" for m in run.metrics))
    read = RunResult.read(folder.path)
    assert read.finished
    assert (read.recipe, read.metrics, read.steps) == (run.recipe, run.metrics, 100)
    assert read.sessions[-1] == SESSION


# --------------------------------------------------------------------- table


def test_a_row_has_means_errors_differences_and_costs() -> None:
    rows = summarise(compared(SCORES), TIMING["steps"])
    assert [r.group.method for r in rows] == ["full", "random", "pfb"]
    pfb = row(rows, "pfb")
    assert pfb.mean == pytest.approx((90 + 91.25 + 91) / 3)
    assert pfb.error == pytest.approx(float(stats.sem([90, 91.25, 91])))
    for d, rival in ((pfb.minus_full, "full"), (pfb.minus_random, "random")):
        assert d is not None
        mean = float(np.mean(list(SCORES["pfb"].values())) - np.mean(list(SCORES[rival].values())))
        assert (d.mean, d.n, d.df) == (pytest.approx(mean), 3, 4)
        assert (d.low, d.high) == pytest.approx((mean - HALF, mean + HALF))
    assert pfb.flops == pytest.approx((0.6, 0.84))
    assert pfb.effective_ratio == pytest.approx((0.5, 0.2))
    assert pfb.wall == TIMING["steps"]["pfb, p = 0.5"]
    full, random = row(rows, "full"), row(rows, "random")
    assert full.minus_full is full.minus_random is random.minus_random is full.wall is None
    assert random.minus_full is not None
    assert random.minus_full.mean == pytest.approx((-3 - 3.5 - 1.25) / 3)


def test_rivals_are_found_at_the_same_setting() -> None:
    results: dict[Group, dict[int, RunResult]] = {}
    for batch_size, offset in ((64, 0.0), (128, 10.0)):
        for noise in (0.1, 0.2):
            scores = {"full": {0: 50.0 + offset}, "random": {0: 45.0 + offset}, "pfb": {0: 49.0 + offset + noise}}
            results |= compared(scores, over={"batch_size": batch_size, "density.noise": noise})
    assert len(results) == 2 + 2 + 4
    for r in summarise(results, {}):
        if r.group.method == "pfb":
            noise = dict(r.group.settings)["density.noise"]
            assert r.minus_full is not None
            assert r.minus_random is not None
            assert r.minus_full.mean == pytest.approx(-1 + noise)
            assert r.minus_random.mean == pytest.approx(4 + noise)


def test_random_at_the_same_cost_is_the_one_whose_run_costs_the_same() -> None:
    """At p = 0.5 the made-up PFB costs 0.84, as random pruning does at p = 0.4."""
    results = {
        **compared({"full": seeds([91.0, 92.0]), "random": seeds([80.0, 81.0]), "pfb": seeds([90.0, 91.5])}),
        **compared({"random": seeds([85.0, 86.0])}, ratio=0.4),
    }
    rows = summarise(results, {})
    pfb = row(rows, "pfb")
    assert pfb.minus_random is not None
    assert pfb.minus_random_at_cost is not None
    assert pfb.minus_random.mean == pytest.approx(10.25)
    assert pfb.minus_random_at_cost.mean == pytest.approx(5.25)
    assert all(r.minus_random_at_cost is None for r in rows if r.group.method != "pfb")


def test_other_methods_are_told_apart_from_random_only_where_the_intervals_do() -> None:
    scores = {
        "random": seeds([80.0, 81.0, 80.5]),
        "rotate": seeds([85.0, 86.1, 85.5]),
        "ucb": seeds([70.0, 71.1, 70.4]),
        "last_loss": seeds([79.0, 83.0, 80.0]),
    }
    same_ratio, same_cost = reading(summarise(compared(scores), {}))
    assert "at the same ratio: better rotate, p = 0.5. Worse ucb, p = 0.5. The others" in same_ratio
    assert same_cost == same_ratio.replace("same ratio", "same cost")


def test_without_a_rival_the_difference_is_left_empty() -> None:
    only = summarise(compared({"pfb": seeds([90.0, 91.0])}), {})[0]
    assert only.minus_full is only.minus_random is None
    assert table.cells(only)[3:5] == ["", ""]
    apart = summarise(compared({"full": {0: 90.0}, "pfb": {1: 90.0}}), {})[1]
    assert apart.minus_full is None, "no seed in common"
    assert reading([only, apart]) == []


def test_text_markdown_and_json_hold_the_same_numbers(tmp_path: Path) -> None:
    results = compared(SCORES)
    rows = summarise(results, TIMING["steps"])
    to_random = (90 + 91.25 + 91 - 88 - 89 - 89.5) / 3
    expected = [
        "pfb, p = 0.5",
        f"{(90 + 91.25 + 91) / 3:.2f} ± {float(stats.sem([90, 91.25, 91])):.2f}",
        "3",
        "-0.67 [",
        f"+1.92 [{to_random - HALF:+.2f}, {to_random + HALF:+.2f}]",
        "",  # no random pruning at the same cost
        "0.500 / 0.200",
        "0.600 / 0.840",
        "0.65 [0.61, 0.70]",
    ]
    text = table.text(rows)
    (line,) = [line for line in text.splitlines() if line.startswith("pfb")]
    page = table.markdown(rows, "halfway compare x", RECIPE, SESSION, TIMING)
    (table_row,) = [line for line in page.splitlines() if line.startswith("| pfb")]
    for cell, in_page in zip(expected, table_row.strip("| ").split(" | "), strict=True):
        assert in_page.startswith(cell)
        assert cell in line
    shown = [column for column in table.COLUMNS if column not in (*ABOUT_CONTROLS, *ABOUT_PROXIES)]
    assert all(column in text.splitlines()[0] and column in page for column in shown)
    assert not any(column in text or column in page for column in (*ABOUT_CONTROLS, *ABOUT_PROXIES))
    recorded.write(tmp_path, rows, "halfway compare x", results, TIMING)
    written = json.loads((tmp_path / "results.json").read_text())
    (pfb,) = [r for r in written["rows"] if r["label"] == "pfb, p = 0.5"]
    assert pfb["scores"] == {"0": 90.0, "1": 91.25, "2": 91.0}
    assert pfb["mean"] == pytest.approx((90 + 91.25 + 91) / 3)
    low_and_high = (pfb["minus_random"]["low"], pfb["minus_random"]["high"])
    assert low_and_high == pytest.approx((to_random - HALF, to_random + HALF))
    assert pfb["flops"] == pytest.approx([0.6, 0.84])
    assert written["command"] == "halfway compare x"
    assert written["timing"] == TIMING


def test_the_page_says_what_its_numbers_must_not_stand_without() -> None:
    results = compared(SCORES)
    rows = summarise(results, TIMING["steps"])
    page = table.markdown(rows, "halfway compare x --seeds 0,1,2", RECIPE, SESSION, TIMING)
    for needed in (
        "`halfway compare x --seeds 0,1,2`",
        "top-1 accuracy",
        "seeds (0, 1, 2)",
        "95 % t interval",
        "15 rounds of all methods in turn, 2 thread(s)",
        SESSION["data"],
        "2024-05-06",
        "Imaginary CPU, 3 cores",
        "torch 9.8.7",
    ):
        assert needed in page
    untimed = table.markdown(summarise(results, {}), "x", RECIPE, SESSION, {"steps": {}})
    assert "rounds" not in untimed


def test_full_data_for_fewer_epochs_cost_their_share_of_all_epochs() -> None:
    whole = compared({"full": {0: 90.0}, "pfb": {0: 85.0}})
    short = result("full", 0.0, 0, 88.0, seen=600, spent=600.0, retained=600)
    rows = summarise({**whole, group_of("full", None, {"length": 6}): {0: short}}, {})
    assert [r.cost for r in rows] == pytest.approx([1.0, 0.84, 0.6])
    assert rows[2].flops == (1.0, 1.0), "its steps are whole ones"
    assert table.cells(rows[2])[-2] == "1.000 / 0.600"


# ---------------------------------------------------------------------- file


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    results = compared(SCORES, over={"batch_size": 64, "window": (1, 3)})
    rows = summarise(results, TIMING["steps"])
    trials = [Trial(group, seed, RECIPE) for group, runs in results.items() for seed in runs]
    recorded.note_plan(tmp_path, trials, "halfway compare x")
    planned = recorded.read(tmp_path)
    assert planned is not None
    assert (planned.rows, planned.recipe) == ([], None)
    recorded.write(tmp_path, rows, "halfway compare x", results, TIMING)
    later = Trial(next(iter(results)), 7, RECIPE)
    recorded.note_plan(tmp_path, [later], "halfway compare x --seeds 7")
    read = recorded.read(tmp_path)
    assert read is not None
    assert read.rows == rows
    assert list(read.groups) == list(results)
    assert read.groups[later.group] == {seed: Path(f"{later.group.folder}-s{seed}") for seed in (0, 1, 2, 7)}
    assert read.recipe is not None
    assert read.recipe.identity() == recipe_of(results).identity()
    assert read.session["date"] == SESSION["date"]
    assert (read.command, read.timing) == ("halfway compare x", TIMING)


def recipe_of(results: dict[Group, dict[int, RunResult]]) -> Recipe:
    """What all runs share, and the defaults of what they do not."""
    content = next(iter(results.values()))[0].recipe.as_dict()
    return from_dict({key: value for key, value in content.items() if key not in OF_A_RUN})


@pytest.mark.parametrize("name", sorted(path.parent.name for path in RESULTS.glob("*/results.json")))
def test_the_committed_results_are_read(name: str) -> None:
    read = recorded.read(RESULTS / name)
    assert read is not None
    assert read.recipe is not None
    assert (RESULTS / name / "table.md").read_text().startswith(f"# {read.recipe.name}: ")
    # The steps of `shorter` are whole ones, and there are fewer of them; their number is rounded.
    expected = {row.group.label: 1 - row.group.ratio for row in read.rows if row.group.method == "shorter"}
    for row in read.rows:
        assert row.cost == pytest.approx(expected.get(row.group.label, row.flops[1]), abs=1e-3)


def test_costs_are_averaged_over_seeds() -> None:
    results = {group_of("pfb", 0.5, {}): {0: result("pfb", 0.5, 0, 90.0, 40), 1: result("pfb", 0.5, 1, 90.0, 80)}}
    (only,) = summarise(results, {})
    assert only.flops == pytest.approx((0.6, (0.84 + 0.68) / 2))
    assert only.effective_ratio == pytest.approx((0.5, 0.3))
    assert only.seconds == 100.0
    assert only.error == 0.0
    assert math.isclose(only.mean, 90.0)
