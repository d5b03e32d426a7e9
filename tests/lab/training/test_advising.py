"""`halfway advise RECIPE`: the recipe's own training is tried, and the command that follows is one."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from halfway.advice import advice
from halfway.advice.evidence import Evidence
from halfway.advice.recommend import Recommendation
from halfway.lab import cli
from halfway.lab.commands import train
from halfway.lab.recipes import reading
from halfway.lab.training import advising
from tests.advice.invented import Ticking, method
from tests.helpers.small_training import CPU, SETTINGS, SMALL, Recipe, Training, data

WINS = (0.9, 0.4, 1.4)


@pytest.fixture(autouse=True)
def _invented_time(monkeypatch: pytest.MonkeyPatch) -> None:
    Ticking.time, Ticking.tick = 0.0, 0.01
    monkeypatch.setattr(advice, "Clock", Ticking)
    monkeypatch.setattr(advice.known, "read", Evidence)


def understood(command: str) -> Recipe:
    """The recipe that `halfway train` would train."""
    seen: list[Any] = []

    def note(arguments: Any) -> int:
        chosen = {"method": arguments.method, "prune_ratio": arguments.prune_ratio}
        seen.append(train.read_recipe(arguments).with_settings({k: v for k, v in chosen.items() if v is not None}))
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "run", note)
        assert cli.main(shlex.split(command)[1:]) == 0
    return seen[0]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("random", "random_even"), ("no evidence", "random_even"), ("fewer epochs", "shorter")],
)
def test_the_command_trains_what_was_recommended(kind: Any, name: str) -> None:
    found = understood(
        advising.command(Recommendation(kind, ""), 0.4, ["tiny-cifar10", "--epochs", "12", "cut=layer2"])
    )
    assert (found.name, found.method, found.length, found.cut) == ("tiny-cifar10", name, 12, "layer2")
    assert found.prune_ratio == 0.4


def test_the_command_of_a_method_has_its_settings_and_no_window() -> None:
    finding = method("early_exit", WINS, settings={"pick": "hard"})
    found = understood(advising.command(Recommendation("method", "", (), (finding,)), 0.5, ["tiny-cifar10"]))
    assert (found.method, found.window) == ("early_exit", (0, None))
    assert found.method_settings["pick"] == "hard"


def test_the_batches_are_those_of_the_training_one_epoch_after_the_other() -> None:
    small = reading.load("tiny-cifar10").with_settings({**SMALL, "method": "full"})
    training = Training(small, data.load(small.data, small.root, CPU), CPU, show=False)
    batches = advising.Batches(training)
    assert len(batches) == 160 // 32
    for epoch in range(2):
        theirs = list(training.data.train.batches(training.order.epoch(epoch)))
        mine = list(batches)
        assert len(mine) == len(theirs)
        for (x, y), (x_, y_, _) in zip(mine, theirs, strict=True):
            assert (x == x_).all()
            assert (y == y_).all()


def test_the_ratio_is_the_recipes_or_one_half() -> None:
    plain = reading.load("tiny-cifar10")
    assert advising.ratio_of(plain.with_settings({"prune_ratio": 0.3})) == 0.3
    assert advising.ratio_of(plain.with_settings({"prune_ratio": 0.0})) == 0.5


def test_a_recipe_is_tried_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", "tiny-cifar10", *SETTINGS, "--data", "synthetic", "--minutes", "0.1", "prune_ratio=0.25"]
    assert cli.main([*words, "label_smoothing=0.2"]) == 0
    text = capsys.readouterr().out
    assert "With label smoothing (0.2)" in text
    assert "Regime: " in text
    assert "that prunes 25%" in text
    command = text.strip().splitlines()[-1].strip()
    found = understood(command)
    assert (found.method, found.prune_ratio, found.root) == ("random_even", 0.25, "synthetic")
    assert found.batch_size == 32


def test_a_recipe_that_counts_steps_and_segments_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", "tiny-voc", "--data", "synthetic", "--minutes", "0.05", "--epochs", "4"]
    small = ["data.train_samples=24", "data.test_samples=4", "batch_size=4", "data.size=[32, 32]"]
    assert cli.main([*words, *small]) == 0
    assert "Regime: " in capsys.readouterr().out


def test_the_time_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", "tiny-cifar10", "--minutes", "0"]) == 2
    assert "--minutes must be more than 0" in capsys.readouterr().err
