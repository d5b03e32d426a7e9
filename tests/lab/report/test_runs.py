"""The runs of a report: how they are found and grouped, which are shown, and what cannot stand together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pytest.importorskip("torchmetrics")
pytest.importorskip("torchvision")
pytest.importorskip("yaml")

from halfway.lab.comparison import trials
from halfway.lab.comparison.results import note_plan
from halfway.lab.comparison.trials import Group, group_of
from halfway.lab.report import runs as report_runs
from halfway.lab.report.runs import Runs
from halfway.lab.training.run_result import RunResult
from tests.helpers.reports import COMMAND, tiny
from tests.lab.comparison.test_table import result


def test_groups_are_in_the_order_of_the_table(compared: Path) -> None:
    runs = report_runs.read([compared])
    expected = [("full", None), ("random", 0.5), ("random", 0.7), ("pfb", 0.5), ("pfb", 0.7)]
    assert [(g.method, g.ratio) for g in runs.groups] == expected
    assert all(list(seeds) == [0, 1] for seeds in runs.groups.values())
    assert runs.main == Group("pfb", 0.5)
    assert runs.sweep is None


def test_a_sweep_groups_by_the_setting_only_where_it_matters(swept: Path) -> None:
    runs = report_runs.read([swept])
    noise = [("pfb", 0.5, (("density.noise", value),)) for value in (0.001, 0.01, 1)]
    assert [(g.method, g.ratio, g.settings) for g in runs.groups] == [("full", None, ()), ("random", 0.5, ()), *noise]
    assert runs.sweep == "density.noise"
    assert runs.main == Group("pfb", 0.5, (("density.noise", 0.01),)), "the recipe's own value"
    plan = trials.plan(tiny(), ["full", "random", "pfb"], [0.5], [0, 1], {"density.noise": [0.001, 0.01, 1]})
    assert set(runs.groups) == {t.group for t in plan}, "the same groups as the comparison that trained them"


def test_groups_are_those_that_compare_has_written_down(compared: Path, tmp_path: Path) -> None:
    """Two runs that differ in their seed only are two groups if the comparison says so; a run it does not know makes
    the report guess for all."""
    for name in ("pfb-0.5-s0", "pfb-0.5-s1"):
        shutil.copytree(compared / name, tmp_path / name)
    groups = [group_of("pfb", 0.5, {"optimizer.lr": value}) for value in (0.1, 0.2)]
    plan = [trials.Trial(group, 0, tiny()) for group in groups]
    for trial, name in zip(plan, ("pfb-0.5-s0", "pfb-0.5-s1"), strict=True):
        (tmp_path / name).rename(tmp_path / trial.folder)
    note_plan(tmp_path, plan, COMMAND)
    assert list(report_runs.read([tmp_path]).groups) == groups
    shutil.copytree(compared / "full-s0", tmp_path / "full-s0")
    assert list(report_runs.read([tmp_path]).groups) == [Group("full", None), Group("pfb", 0.5)]


def test_a_setting_left_at_its_default_is_the_same_as_the_default_given(compared: Path) -> None:
    run = RunResult.read(compared / "pfb-0.5-s0")
    other = RunResult(run.path, run.recipe.with_settings({"seed": 5, "density.beta": 0.01}), [], [], 0)
    assert list(report_runs.group_runs([run, other])) == [Group("pfb", 0.5)]


def test_folders_of_runs_and_runs_can_be_mixed_and_count_once(compared: Path) -> None:
    some = report_runs.find([compared / "pfb-0.5-s0", compared])
    assert len(some) == 11
    assert some[0] == compared / "pfb-0.5-s0"


def test_wall_times_are_found_under_both_spellings_of_a_number(compared: Path, tmp_path: Path) -> None:
    (tmp_path / "timing.json").write_text(json.dumps({"steps": {"pfb, p = 0.5, optimizer.lr=1": {"median": 0.5}}}))
    group = Group("pfb", 0.5, (("optimizer.lr", 1.0),))
    assert report_runs._timing([tmp_path], {group: {}})["steps"] == {group.label: {"median": 0.5}}


def test_of_many_methods_figures_with_a_line_each_show_the_best() -> None:
    """Full data, random and PFB at its ratio, and the best of the others; all of them where they are few."""
    scores = {"full": 90.0, "random": 50.0, "pfb": 40.0, "rotate": 80.0, "ucb": 10.0, "rs2": 70.0, "loss": 60.0}
    groups: Any = {}
    for method, score in scores.items():
        groups[group_of(method, 0.5, {})] = {0: result(method, 0.5, 0, score)}
    groups[group_of("random", 0.3, {})] = {0: result("random", 0.3, 0, 95.0)}
    shown = Runs(groups, [], {}).shown
    assert [group.label for group in shown] == [
        "full",
        *(f"{method}, p = 0.5" for method in ("random", "pfb", "rotate", "rs2", "loss")),
    ]
    few = {group: seeds for group, seeds in groups.items() if group.method in ("full", "random", "pfb", "ucb")}
    assert Runs(few, [], {}).shown == few


# -------------------------------------------------------------------------------------------------------- errors


def test_runs_of_different_recipes_are_refused_by_name(compared: Path, segmented: Path) -> None:
    with pytest.raises(ValueError, match=r"different recipes.*tiny-cifar10, tiny-voc"):
        report_runs.read([compared, segmented])


def test_the_same_run_twice_is_refused_by_folder(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared / "full-s0", tmp_path / "copy")
    with pytest.raises(ValueError, match=r"full-s0 and .*copy are the same run"):
        report_runs.read([compared, tmp_path / "copy"])


def test_nothing_finished_is_an_error_that_says_how_to_go_on(compared: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing to report yet.*--seed 7 --resume"):
        report_runs.read([compared / "random-0.5-s7"])


def test_folders_without_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither a run folder"):
        report_runs.read([tmp_path])
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        report_runs.read([tmp_path / "nowhere"])


def test_synthetic_and_real_runs_are_not_mixed(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared / "full-s0", tmp_path / "real")
    config = tmp_path / "real" / "config.yaml"
    config.write_text(config.read_text().replace("root: synthetic", "root: data").replace("seed: 0", "seed: 9"))
    with pytest.raises(ValueError, match="synthetic pictures and others real data"):
        report_runs.read([compared, tmp_path / "real"])
