"""The page of a study: what stands in it, which words it may use, and what it says when runs are missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")
pytest.importorskip("yaml")
pytest.importorskip("matplotlib")

from halfway.lab import cli
from halfway.lab.study import plan, tables
from halfway.lab.study.results import Study, collect

from .invented import CONTROLS, PFB, entries, on_the_curves, stage, write

ARMS = {
    **CONTROLS,
    **PFB,
    "hard": {"method": "last_loss_hard", "prune_ratio": 0.5},
    "balanced": {"method": "balanced_remembered", "prune_ratio": 0.5},
    "rs2": {"method": "rs2", "prune_ratio": 0.5},
}
RUNGS = ["ladder-c4", "ladder-c16", "ladder-f8"]
EFFECTS = {"hard": 4.0, "balanced": 0.0, "pfb": -4.0}
CONFIRM: dict[str, Any] = {"confirm": stage(RUNGS, ARMS, primary=["hard", "balanced"], about="does it hold?")}


def score(run: plan.Run, cost: float) -> float:
    return on_the_curves(run, cost) + EFFECTS.get(run.arm, 0.0)


def results(stages: dict[str, Any] = CONFIRM, **without: Any) -> list[dict[str, Any]]:
    """All lines of the ledger, without those that agree with all of `without`."""
    lines = entries(stages, score)
    return [line for line in lines if not (without and all(line[key] == value for key, value in without.items()))]


def page(study: Study, *wanted: str) -> str:
    return tables.page(study, wanted or list(study.stages), "halfway study x --table", None)


def row(text: str, arm: str) -> list[str]:
    """The cells of the first row of an arm in the table of a recipe."""
    line = next(line for line in text.split("### ")[1].splitlines() if line.startswith(f"| {arm}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_rung_says_what_full_data_reach_and_then_every_arm() -> None:
    text = page(collect(CONFIRM, results()))
    assert "### ladder-c4: a small ResNet on 40,000 images of CIFAR-10, 16 px, 4 passes" in text
    assert re.search(r"Full data: 8\d\.\d\d % \(n = 3\), 91.5 % on its training images, 25 % of the plain losses", text)
    assert "does it hold?" in text
    assert "Scores on test images, seeds 0, 1, 2. All 108 runs are there." in text
    cells = dict(zip(tables.COLUMNS, row(text, "pfb"), strict=True))
    assert cells["cost"] == "0.620"
    assert cells["n"] == "3"
    assert cells["gain over the better"] == f"{cells['to random']} (r)"
    assert cells["equivalent cost"]
    assert re.fullmatch(r"-0\.0\d\d \[.*\]", cells["gain in test loss"])


def test_a_second_draw_of_random_pruning_is_the_noise_floor_and_samplers_are_labelled() -> None:
    text = page(collect(CONFIRM, results()))
    assert row(text, "random 0.5 again")[0] == "random 0.5 again (A/A: the noise floor)"
    assert row(text, "random 0.5 again")[4], "its difference to the first draw"
    assert row(text, "rs2")[0] == "rs2 (before the epoch: fewer steps)"


def test_words_of_the_primary_family_are_corrected_and_all_others_exploratory() -> None:
    text = page(collect(CONFIRM, results()))
    assert row(text, "hard")[7] == "better (Holm p < 0.001)"
    assert row(text, "balanced")[7].startswith("not told apart (Holm p = ")
    assert row(text, "pfb")[7] == "worse, exploratory"
    assert "After Holm's correction over 6 comparisons: of 6 settings better in 3, not told apart in 3." in text


def test_a_gain_whose_own_interval_leaves_out_zero_may_fail_after_the_correction() -> None:
    study = collect(CONFIRM, results())
    each = next(e for e in study.gains["confirm"] if e.arm.name == "hard")
    weak = Study(study.stages, study.arms, study.gains, dict.fromkeys(study.adjusted, 0.2), study.family)
    assert study.word(each) == "better"
    assert weak.word(each) == "not told apart"


def test_missing_runs_are_named_and_the_family_keeps_its_size() -> None:
    study = collect(CONFIRM, results(arm="hard", recipe="ladder-f8"))
    text = page(study)
    assert "3 of 108 runs are missing. ladder-f8: hard (seeds 0, 1, 2)." in text
    assert study.family == 6
    assert "5 of the 6 are there; the others count as if they showed nothing." in text
    assert "these words may change" in text
    assert "| missing |" in text
    full = collect(CONFIRM, results())
    for name, p in study.adjusted.items():
        assert p >= full.adjusted[name] or p > 0.05


def test_a_recipe_without_results_is_missing_as_a_whole() -> None:
    text = page(collect(CONFIRM, results(recipe="ladder-c16")))
    assert "ladder-c16: all." in text
    assert "### ladder-c16" not in text


def test_missing_runs_of_many_arms_are_counted_by_seeds() -> None:
    names = list(ARMS)

    def missing(gone: dict[str, list[int]]) -> str:
        there = [e for e in results() if e["recipe"] != "ladder-c16" or e["seed"] not in gone.get(e["arm"], [])]
        return tables.missing(collect(CONFIRM, there).arms["confirm"])

    assert missing({"full": [2], "hard": [2]}).endswith("ladder-c16: full and hard (seeds 2).")
    assert missing({key: [2] for key in names}).endswith("ladder-c16: all arms (seeds 2).")
    several = missing({"full": [1, 2], **{key: [2] for key in names[1:5]}})
    assert several.endswith(f"ladder-c16: full (seeds 1, 2); 4 of {len(names)} arms (seeds 2).")


def test_without_controls_there_are_scores_and_no_claims() -> None:
    stages = {"screen": stage(["ladder-c16"], PFB, settings={"data.evaluate": "validation"})}
    text = page(collect(stages, results(stages)))
    assert "Scores on validation images" in text
    assert "There are no results of full data." in text
    assert "| arm | cost | score | n |" in text, "no empty columns"
    assert "exploratory |" not in text


def test_words_for_better_and_worse_come_from_one_module() -> None:
    source = "".join(path.read_text() for path in Path(tables.__file__).parent.glob("*.py"))
    assert not re.search(r"""["'](better|worse)["'] if|==? ["'](better|worse)["']""", source)


def test_the_command_writes_page_and_plot_beside_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, CONFIRM, results())
    assert cli.main(["study", str(file), "--table"]) == 0
    assert "## The primary family (confirm)" in capsys.readouterr().out
    assert "](map.svg)" in (tmp_path / "map.md").read_text()
    assert (tmp_path / "map.svg").read_text().startswith("<?xml")


def test_the_command_works_with_validation_runs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = stage(["ladder-c16"], {k: CONTROLS[k] for k in ("full", "random 0.5", "shorter 0.5")})
    rates["settings"] = {"data.evaluate": "validation"}
    file = write(tmp_path, {"rates": rates, **CONFIRM}, results({"rates": rates}))
    assert cli.main(["study", str(file), "--table"]) == 0
    assert "no plot yet" in capsys.readouterr().out
    assert not (tmp_path / "map.svg").exists()
    assert "None of its 108 runs is there yet." in (tmp_path / "map.md").read_text()


def test_tables_of_some_stages_do_not_replace_the_page_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = {**CONFIRM, "more": stage(["ladder-c4"], CONTROLS, about="another one")}
    file = write(tmp_path, stages, results())
    assert cli.main(["study", str(file), "--table", "--stages", "confirm"]) == 0
    printed = capsys.readouterr().out
    assert "## The primary family (confirm)" in printed
    assert "another one" not in printed
    assert not (tmp_path / "map.md").exists()
    assert cli.main(["study", str(file), "--table", "--stages", "more", "--evidence", str(tmp_path / "e.json")]) != 0
    assert "leave out --stages" in capsys.readouterr().err


def test_without_results_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, CONFIRM, [])
    assert cli.main(["study", str(file), "--table"]) != 0
    assert "there are no results in" in capsys.readouterr().err


def test_a_primary_arm_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path, {"confirm": stage(RUNGS, ARMS, primary=["balancd"])}, [])
    with pytest.raises(ValueError, match=r"primary names 'balancd'.*balanced"):
        plan.read(file)
