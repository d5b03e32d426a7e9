"""The extract of a study that `halfway advise` goes by."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")
pytest.importorskip("yaml")

from halfway.advice import evidence as advice
from halfway.lab import cli
from halfway.lab.study import evidence
from halfway.lab.study.results import collect

from .invented import CONTROLS, PFB, entries, on_the_curves, stage, write

RUNG = "ladder-c16"
EARLY_EXIT = {"hard": {"method": "early_exit", "prune_ratio": 0.5, "early_exit.pick": "hard"}}


def extracted(stages: dict[str, Any], lines: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    lines = entries(stages, on_the_curves) if lines is None else lines
    return evidence.extract(collect(stages, lines), len(lines))


def rung(content: dict[str, Any], name: str = RUNG) -> dict[str, Any]:
    return next(each for each in content["rungs"] if each["name"] == name)


def arms(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["arm"]: each for each in rung(content)["findings"]}


def test_differences_are_those_of_a_slow_loop() -> None:
    stages = {"confirm": stage([RUNG], {**CONTROLS, **PFB, **EARLY_EXIT})}
    lines = entries(stages, on_the_curves)
    score = {(line["arm"], line["seed"]): line["score"] for line in lines}
    found = arms(extracted(stages, lines))
    for name in ("random 0.5", "shorter 0.3", "pfb", "hard"):
        mean = statistics.fmean(score[name, seed] - score["full", seed] for seed in range(3))
        assert found[name]["to_full"][0] == pytest.approx(mean, abs=6e-4)
        low, high = found[name]["to_full"][1:]
        assert low < mean < high
    between = statistics.fmean(score["random 0.5", s] - score["shorter 0.5", s] for s in range(3))
    assert found["random 0.5"]["gain"][0] == pytest.approx(between, abs=6e-4)
    assert found["random 0.5"]["better"] == "shorter"
    assert found["shorter 0.5"]["gain"][0] == pytest.approx(-between, abs=6e-4)


def test_the_p_value_of_a_gain_agrees_with_its_interval() -> None:
    content = extracted({"confirm": stage([RUNG], {**CONTROLS, **PFB, **EARLY_EXIT})})
    for found in arms(content).values():
        _, low, high = found["gain"]
        assert float(f"{found['p']:.4g}") == found["p"]
        assert (found["p"] < 0.05) == (low > 0 or high < 0)


def test_what_a_method_is_can_be_pasted() -> None:
    found = arms(extracted({"screen": stage([RUNG], {**CONTROLS, **PFB, **EARLY_EXIT})}))
    assert found["pfb"]["selector"] == "density"
    assert found["pfb"]["settings"] == {}  # what the recipe says is the default
    assert found["hard"]["settings"] == {"pick": "hard"}
    assert found["hard"]["cut"] == "layer1"
    assert found["random 0.5"]["cut"] == ""
    assert (found["shorter 0.5"]["role"], found["shorter 0.5"]["selector"]) == ("shorter", "")
    assert "random 0.5 again" not in found
    assert "full" not in found
    assert {each["stage"] for each in found.values()} == {"confirm"}  # on test images
    on_validation = {"screen": stage([RUNG], CONTROLS, settings={"data.evaluate": "validation"})}
    assert {each["stage"] for each in arms(extracted(on_validation)).values()} == {"screen"}


@pytest.mark.parametrize(
    "more", [{"window_of_run": [0, 0.5]}, {"times": {"optimizer.lr": 0.5}}, {"label_smoothing": 0.1}]
)
def test_arms_with_other_settings_than_those_of_the_method_are_left_out(more: dict[str, Any]) -> None:
    plain = {"method": "order_dp", "prune_ratio": 0.5}
    found = arms(extracted({"confirm": stage([RUNG], {**CONTROLS, "plain": plain, "other": {**plain, **more}})}))
    assert "plain" in found
    assert "other" not in found


def test_a_stage_with_other_settings_than_the_recipes_is_left_out() -> None:
    stages = {
        "confirm": stage([RUNG], {**CONTROLS, **PFB}),
        "smoothing": stage([RUNG], {**CONTROLS, **EARLY_EXIT}, settings={"label_smoothing": 0.1}),
    }
    found = arms(extracted(stages))
    assert "pfb" in found
    assert "hard" not in found
    assert len(rung(extracted(stages))["findings"]) == len(rung(extracted({"confirm": stages["confirm"]}))["findings"])


def test_a_recipe_beside_the_ladders_counts_as_a_rung_only_if_its_data_are_not_special() -> None:
    content = extracted({"scale": stage(["speedrun-cifar10", "ladder-f8-noisy"], CONTROLS)})
    assert rung(content, "speedrun-cifar10")["ladder"] == "speedrun"
    assert rung(content, "ladder-f8-noisy")["ladder"] == ""


def test_a_method_of_a_single_seed_makes_no_finding_but_was_tried() -> None:
    once = {**PFB["pfb"], "seeds": [0]}
    again = {"pfb again": PFB["pfb"], "windowed": {**PFB["pfb"], "window_of_run": [0, 0.5]}}  # the same method
    easier = {"easy": {**EARLY_EXIT["hard"], "early_exit.pick": "proportional", "seeds": [1]}}
    planned = {**CONTROLS, **EARLY_EXIT, **easier, "pfb": once}
    content = extracted({"confirm": stage([RUNG], planned), "more": stage([RUNG], again)})
    assert not {"pfb", "easy"} & {each["arm"] for each in rung(content)["findings"]}
    assert rung(content)["tried"] == 3


def test_the_seeds_of_a_finding_are_those_of_its_gain() -> None:
    stages = {"confirm": stage([RUNG], {**CONTROLS, **PFB}, seeds=[0, 1, 2, 3])}
    lines = entries(stages, on_the_curves)
    fewer = [line for line in lines if not (line["arm"].startswith("shorter") and line["seed"] == 3)]
    found = arms(extracted(stages, fewer))
    assert (found["pfb"]["n"], found["random 0.5"]["n"]) == (3, 3)


def test_of_a_stage_with_fresh_seeds_these_alone_count() -> None:
    planned = stage([RUNG], {**CONTROLS, **PFB}, seeds=[0, 1, 2, 3, 4])
    lines = entries({"again": planned}, on_the_curves)
    for line in lines:
        line["score"] += 5 * (line["arm"] == "pfb" and line["seed"] < 2)  # why it was planned
    found = arms(extracted({"again": {**planned, "fresh_seeds": [2, 3, 4]}}, lines))
    alone = arms(extracted({"again": {**planned, "seeds": [2, 3, 4]}}, lines))
    for name, each in found.items():  # the intervals differ: those of fresh seeds are by each arm's own differences
        assert (each["n"], each["to_full"], each["better"]) == (3, alone[name]["to_full"], alone[name]["better"])
        assert each["gain"][0] == alone[name]["gain"][0]
    assert found["pfb"]["gain"][0] < arms(extracted({"again": planned}, lines))["pfb"]["gain"][0] - 1


def test_a_single_seed_is_no_comparison_but_has_a_share() -> None:
    content = extracted({"confirm": stage([RUNG], CONTROLS, seeds=[0])})
    assert rung(content)["findings"] == []
    assert rung(content)["small"] == {"full": 0.25, "random": 0.25}


def test_a_stage_that_tunes_gives_shares_of_the_recipes_own_rate_alone() -> None:
    rates = {f"full, {factor}": {"method": "full", "times": {"optimizer.lr": factor}} for factor in (1, 2)}
    stages = {"rates": stage([RUNG], {**rates, "random": {"method": "random", "prune_ratio": 0.5}})}
    lines = entries(stages, on_the_curves)
    for line in lines:
        line["curve"][-1][3] = 0.9 if line["arm"] == "full, 2" else 0.1 + 0.1 * line["seed"]
    content = rung(extracted(stages, lines))
    assert content["findings"] == []
    assert content["small"] == {"full": pytest.approx(0.2), "random": pytest.approx(0.2)}
    assert (content["ladder"], content["passes"]) == ("C", 16)


def test_the_command_writes_what_advice_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = {"confirm": stage([RUNG, "ladder-f8-noisy"], {**CONTROLS, **PFB})}
    lines = entries(stages, on_the_curves)
    study, out = write(tmp_path, stages, lines), tmp_path / "evidence.json"
    assert cli.main(["study", str(study), "--table", "--evidence", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    content = json.loads(out.read_text())
    assert content == json.loads(json.dumps(extracted(stages, lines)))
    known = advice.parsed(content)
    assert {rung.name: rung.ladder for rung in known.rungs} == {RUNG: "C", "ladder-f8-noisy": ""}
    assert len(known.rungs[0].findings) == 7
    assert cli.main(["study", str(study), "--evidence", str(out)]) == 2
    assert "add --table" in capsys.readouterr().err
