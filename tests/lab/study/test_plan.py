"""What a study file says, and which runs that makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")

from halfway.lab.recipes import reading
from halfway.lab.study import plan
from tests import ROOT
from tests.helpers.recipe_files import written

STAGE = """
stages:
  screen:
    about: for people
    recipes: [ladder-c16, ladder-f8]
    seeds: [3, 4]
    settings: {data.evaluate: validation}
    arms:
      full: {}
      half: {method: random, prune_ratio: 0.5}
      half, hot: {method: random, prune_ratio: 0.5, times: {optimizer.lr: 2, length: 0.5}}
      half, early: {method: random, window_of_run: [0, 0.75]}
"""


def stages(text: str, tmp_path: Path) -> dict[str, dict[str, Any]]:
    return plan.read(Path(written(tmp_path / "study.yaml", text)))


def test_a_stage_is_every_arm_on_every_recipe_with_every_seed(tmp_path: Path) -> None:
    runs = plan.runs("screen", stages(STAGE, tmp_path)["screen"], "elsewhere")
    expected = [
        (seed, base, arm)
        for seed in (3, 4)
        for base in ("ladder-c16", "ladder-f8")
        for arm in ("full", "half", "half, hot", "half, early")
    ]
    assert [(run.seed, run.base, run.arm) for run in runs] == expected, "a seed's runs together"
    assert {run.recipe.root for run in runs} == {"elsewhere"}
    assert {run.recipe.data.evaluate for run in runs} == {"validation"}
    assert {run.recipe.seed for run in runs} == {3, 4}
    assert runs[1].label == "ladder-c16, half, seed 3"
    assert len({run.key for run in runs}) == len(runs)


def test_a_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    text = STAGE + "      again: {method: random, prune_ratio: 0.5, selection_seed: 4}\n"
    with pytest.raises(ValueError, match="the selection_seed of 'again', 4, is one of its seeds"):
        plan.runs("screen", stages(text, tmp_path)["screen"], "elsewhere")


@pytest.mark.parametrize(
    ("fewer", "left"),
    [
        ("seeds: [4]", {(4, "ladder-c16"), (4, "ladder-f8")}),
        ("recipes: [ladder-f8]", {(3, "ladder-f8"), (4, "ladder-f8")}),
    ],
)
def test_an_arm_can_have_fewer_seeds_or_recipes(fewer: str, left: set[tuple[int, str]], tmp_path: Path) -> None:
    text = STAGE.replace("half: {method: random, prune_ratio: 0.5}", f"half: {{method: random, {fewer}}}")
    runs = plan.runs("screen", stages(text, tmp_path)["screen"], "elsewhere")
    assert {(run.seed, run.base) for run in runs if run.arm == "half"} == left
    assert len([run for run in runs if run.arm == "full"]) == 4


def test_a_recipe_can_have_fewer_seeds(tmp_path: Path) -> None:
    stage = {**stages(STAGE, tmp_path)["screen"], "fewer_seeds": {"ladder-f8": [3]}}
    found = {(run.seed, run.base) for run in plan.runs("screen", stage, "elsewhere")}
    assert found == {(3, "ladder-c16"), (4, "ladder-c16"), (3, "ladder-f8")}


def test_an_arm_is_a_recipe_with_changes(tmp_path: Path) -> None:
    found = {run.arm: run.recipe for run in plan.runs("screen", stages(STAGE, tmp_path)["screen"], "data")[:4]}
    base = reading.load("ladder-c16")
    assert found["full"].method == "full"
    assert (found["half"].method, found["half"].prune_ratio) == ("random", 0.5)
    assert found["half"].optimizer == base.optimizer
    assert found["half, hot"].optimizer.lr == pytest.approx(2 * base.optimizer.lr)
    assert found["half, hot"].length == 8, "a whole number stays one"
    assert found["half, early"].window == (0, 12)


def test_a_text_can_name_the_recipe() -> None:
    recipe = reading.load("ladder-c16")
    assert plan.settings_of("x", {"method": "rho", "rho.losses": "losses/{recipe}.pt"}, recipe) == {
        "method": "rho",
        "rho.losses": "losses/ladder-c16.pt",
    }


def test_runs_that_compute_the_same_have_one_key_and_others_have_another(tmp_path: Path) -> None:
    def key(arm: str, content: dict[str, Any], root: str = "data", seed: int = 1, name: str = "a") -> str:
        stage = {"recipes": ["ladder-c16"], "seeds": [seed], "arms": {arm: content}}
        return plan.runs(name, stage, root)[0].key

    half = key("half", {"method": "random", "prune_ratio": 0.5})
    assert half == key("random", {"method": "random", "prune_ratio": 0.5}, root="elsewhere", name="b")
    assert half == key("half", {"method": "random", "prune_ratio": 0.5, "data.workers": 3})
    looked = {"log_every": 1, "evaluate_every": 1, "training_score": 10}
    assert half == key("half", {"method": "random", "prune_ratio": 0.5, **looked}), "looking changes nothing"
    others = [
        key("half", {"method": "random", "prune_ratio": 0.4}),
        key("half", {"method": "random", "prune_ratio": 0.5}, seed=2),
        key("half", {"method": "random", "prune_ratio": 0.5, "data.wrong_labels": 0.1}),
        key("half", {"method": "random", "prune_ratio": 0.5, "data.imbalance": 10}),
        key("half", {"method": "random", "prune_ratio": 0.5, "data.copies": 4}),
        key("full", {}),
    ]
    assert len({half, *others}) == 7


def test_a_setting_at_its_default_does_not_change_a_key(tmp_path: Path) -> None:
    """Ledgers were written before there were variants of the data: their runs are still the same ones."""
    recipe = reading.load("ladder-c16").with_settings(
        {"data.wrong_labels": 0, "data.imbalance": None, "data.copies": 1}
    )
    assert not [key for key in recipe.identity() if key.split(".")[-1] in ("wrong_labels", "imbalance", "copies")]
    varied = recipe.with_settings({"data.wrong_labels": 0.1, "data.imbalance": 4, "data.copies": 2}).identity()
    assert (varied["data.wrong_labels"], varied["data.imbalance"], varied["data.copies"]) == (0.1, 4, 2)


ERRORS = {
    "nothing": ("[]", "has no stages; see `halfway study --help`"),
    "no YAML": ("stages: [", "study.yaml is not YAML"),
    "no stage": ("stages: {a: 3}", "stage a has no recipes, seeds and arms, got 3"),
    "misspelt": ("stages: {a: {recipe: [x]}}", "stage a has no 'recipe'; did you mean recipes"),
    "no seeds": ("stages: {a: {recipes: [ladder-c16], arms: {full: {}}}}", "stage a has no seeds"),
    "text": (
        "stages: {a: {recipes: ladder-c16, seeds: [1], arms: {full: {}}}}",
        r"recipes is a list, as in recipes: \[",
    ),
    "number": ("stages: {a: {recipes: [ladder-c16], seeds: 1, arms: {full: {}}}}", "seeds is a list.*got 1"),
    "seeds of another recipe": (
        "stages: {a: {recipes: [ladder-c16], seeds: [1, 2], fewer_seeds: {ladder-f8: [1]}, arms: {full: {}}}}",
        r"some of its seeds, as in {ladder-c16: \[1\]}; got {ladder-f8: \[1\]}",
    ),
    "fresh seeds that are none": (
        "stages: {a: {recipes: [ladder-c16], seeds: [1, 2], fresh_seeds: [2, 3], arms: {full: {}}}}",
        r"fresh_seeds are some of its seeds, got \[2, 3\]",
    ),
    "other seeds": (
        "stages: {a: {recipes: [ladder-c16], seeds: [1, 2], fewer_seeds: {ladder-c16: [1, 3]}, arms: {full: {}}}}",
        r"got {ladder-c16: \[1, 3\]}",
    ),
    "arms": ("stages: {a: {recipes: [ladder-c16], seeds: [1], arms: [full]}}", "arms is a section"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_a_file_that_is_no_study_is_refused(case: str, tmp_path: Path) -> None:
    text, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        stages(text, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"prune_ratio": 0.5}, "the arm 'x' names no method"),
        ({"method": "random", "times": {"cut": 2}}, "multiplies cut, which is 'layer1' in ladder-c16, no number"),
        ({"method": "random", "times": {"channels_last": 2}}, "which is True"),
        ({"method": "random", "prune_rato": 0.5}, "no setting 'prune_rato'; did you mean prune_ratio"),
    ],
)
def test_an_arm_that_makes_no_sense_is_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan.runs("a", {"recipes": ["ladder-c16"], "seeds": [1], "arms": {"x": content}}, "data")


def test_the_study_of_the_results_can_be_planned() -> None:
    for name, stage in plan.read(ROOT / "results" / "map" / "study.yaml").items():
        assert plan.runs(name, stage, "data")
