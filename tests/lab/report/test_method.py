"""The method's part of a report: the command to repeat a run, and who made the choice, density or noise."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pytest.importorskip("torchmetrics")
pytest.importorskip("torchvision")
pytest.importorskip("yaml")

from halfway.lab.comparison.trials import group_of
from halfway.lab.recipes import reading
from halfway.lab.report import method as report_method
from halfway.lab.report.runs import Runs
from halfway.lab.training.run_result import RunResult
from tests.lab.comparison.test_table import result


def test_the_command_to_repeat_a_run_gives_the_same_recipe(compared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shlex

    from halfway.lab.commands.train import add_recipe_options, read_recipe

    run = RunResult.read(compared / "pfb-0.7-s1")
    words = shlex.split(report_method.repeat_command(run))
    parser = argparse.ArgumentParser()
    add_recipe_options(parser)
    for option in ("--method", "--prune-ratio", "--seed"):
        parser.add_argument(option)
    parsed, rest = parser.parse_known_args(words[2:])
    parsed.settings += rest
    again = read_recipe(parsed).with_settings(
        {"method": parsed.method, "prune_ratio": float(parsed.prune_ratio), "seed": int(parsed.seed)}
    )
    assert again == run.recipe


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [("ladder-c16", 4, ["data.copies=4"]), ("ladder-c16-copies", 4, []), ("ladder-c16-copies", 1, ["data.copies=1"])],
)
def test_the_command_says_which_variant_of_the_data_it_was(name: str, given: int, words: list[str]) -> None:
    assert report_method._changes(reading.load(name).with_settings({"data.copies": given})) == words


def test_the_page_tells_what_share_of_the_choice_the_density_made(compared: Path, text: str) -> None:
    for ratio in (0.5, 0.7):
        shares = []
        for seed in (0, 1):
            *_, last = (compared / f"pfb-{ratio}-s{seed}" / "metrics.jsonl").read_text().splitlines()
            shares.append(json.loads(last)["chosen_by_density"])
        assert f"pfb, p = {ratio}: {sum(shares) / 2:.2f} (n = 2)" in text
    assert "The share of the choice that the density made and not the noise: 1 is all of it" in text
    assert "random, p = 0.5: " not in text.partition("Chosen by density")[2].partition("The share of")[0]
    assert "from then on" not in text


def test_the_share_of_the_density_is_that_of_the_last_round_that_says_it() -> None:
    silent, telling = result("pfb", 0.5, 0, 80.0), result("pfb", 0.5, 1, 80.0, chosen_by_density=0.75)
    group = group_of("pfb", 0.5, {})

    def facts(*found: RunResult) -> dict[str, str]:
        runs = Runs({group: dict(enumerate(found))}, [], {"steps": {}})
        return dict(report_method.how_it_was_measured(runs)["facts"])

    assert silent.chosen_by_density is None, "runs of earlier versions have no such number"
    assert "Chosen by density" not in facts(silent)
    assert facts(silent, telling)["Chosen by density"].startswith("pfb, p = 0.5: 0.75 (n = 1). ")
    again = dataclasses.replace(
        telling,
        metrics=[*telling.metrics, {**telling.metrics[0], "step": 100}],
        sessions=[*telling.sessions, *telling.sessions],
    )
    assert again.chosen_by_density == 0.75, "it was resumed after the last pruned step"
    assert facts(again)["Chosen by density"].endswith("Of a resumed run, from then on.")
