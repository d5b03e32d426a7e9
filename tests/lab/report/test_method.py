"""The method's part of a report: the command to repeat a run."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pytest.importorskip("torchmetrics")
pytest.importorskip("torchvision")
pytest.importorskip("yaml")

from halfway.lab.report import method as report_method
from halfway.lab.training.run_result import RunResult


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
