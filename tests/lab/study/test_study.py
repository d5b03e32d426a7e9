"""`halfway study` from its file to its results, with an arm that fails, and interrupted."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("torchmetrics")
pytest.importorskip("tensorboard")

from halfway.lab.cli import main
from halfway.lab.comparison.pool import _taken
from halfway.lab.study import ledger, plan
from tests.helpers.small_training import ENVIRONMENT, SMALL, trained

ARMS = {
    "full": {},
    "half": {"method": "random", "prune_ratio": 0.5},
    "too hot": {"method": "full", "optimizer.lr": 1e30},
}


def study(folder: Path, arms: dict[str, Any], seeds: int = 1, **changes: Any) -> Path:
    """A study of a small recipe, both in the folder."""
    import yaml

    settings = {"data": {"train_samples": 160, "test_samples": 40}, "model": {"options": SMALL["model.options"]}}
    content = {"extends": "tiny-cifar10", **settings, "batch_size": 32, "window": [0, None], **changes}
    (folder / "small.yaml").write_text(yaml.safe_dump(content))
    stage = {"recipes": [str(folder / "small.yaml")], "seeds": list(range(1, seeds + 1)), "arms": arms}
    (folder / "study.yaml").write_text(yaml.safe_dump({"stages": {"one": stage}}, sort_keys=False))
    return folder / "study.yaml"


def words(path: Path, *more: str) -> list[str]:
    return ["study", str(path), "--data", "synthetic", "--out", str(path.parent / "runs"), *more]


def test_recipes_and_seeds_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = study(tmp_path, ARMS, seeds=3)
    recipe = str(tmp_path / "small.yaml")
    assert main(words(path, "--list", "--seeds", "1, 3")) == 0
    assert "stage one: 6 runs, 6 to do" in capsys.readouterr().out
    assert main(words(path, "--list", "--recipes", recipe, "--seeds", "2")) == 0
    assert "stage one: 3 runs, 3 to do" in capsys.readouterr().out
    assert main(words(path, "--seeds", "4")) == 2
    assert "--seeds: no stage has '4'; " in capsys.readouterr().err
    assert main(words(path, "--recipes", "other")) == 2
    assert "--recipes: no stage has 'other'" in capsys.readouterr().err
    assert main(words(path, "--table", "--seeds", "1")) == 2
    assert "tables are of all that is there" in capsys.readouterr().err


def test_results_are_those_of_the_runs_and_a_failure_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = study(tmp_path, ARMS, length=2, evaluate_every=1, training_score=40, batch_norm_samples=64)
    assert main(words(path, "--list")) == 0
    assert "stage one: 3 runs, 3 to do" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
    assert main(words(path)) == 1
    out, err = capsys.readouterr()
    assert "2 runs are in" in out
    assert "1 failed" in out
    assert "FAILED" in out + err
    assert "the training has diverged" in out + err
    entries = {entry["arm"]: entry for entry in ledger.read(tmp_path / "runs.jsonl")}
    assert set(entries) == {"full", "half"}
    runs = {run.arm: run for run in plan.runs("one", plan.read(path)["one"], "synthetic")}
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == [runs["too hot"].key], "finished ones are gone"
    alone = trained(runs["half"].recipe)
    entry = entries["half"]
    with alone.evaluation.statistics(alone.model):
        found = alone.task.evaluate(alone.model, alone.data.test, torch.device("cpu"))
        seen = alone.task.evaluate(alone.model, alone.data.trained_on, torch.device("cpu"), limit=1)
    assert (entry["score"], entry["test_loss"]) == (found.score, pytest.approx(found.loss))
    assert (entry["training_score"], entry["training_loss"]) == (seen.score, pytest.approx(seen.loss))
    assert (entry["key"], entry["seed"], entry["method"]) == (runs["half"].key, 1, "random")
    assert entry["pruned"] == 0.5
    assert [point[0] for point in entry["curve"]] == [1.0, 2.0]
    assert json.loads(json.dumps(entry)) == entry
    assert main(words(path, "--list")) == 0
    assert "stage one: 3 runs, 1 to do" in capsys.readouterr().out, "what failed, and nothing else"


@pytest.mark.slow
def test_ctrl_c_keeps_a_checkpoint_and_the_same_command_goes_on(tmp_path: Path) -> None:
    # One round, so that no checkpoint is written between the first and the one of the interruption.
    path = study(tmp_path, {"full": {}}, length=40, log_every=40)
    (run,) = plan.runs("one", plan.read(path)["one"], "synthetic")
    checkpoint = tmp_path / "runs" / run.key / "last.pt"
    # So many that their queue is never empty: a process that waits for it would not end.
    study(tmp_path, {"full": {}}, seeds=200, length=40, log_every=40)
    command = [sys.executable, "-m", "halfway", *words(path, "--workers", "1")]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        _wait_for(checkpoint.exists, process)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(60) == 130
    assert not (tmp_path / "runs.jsonl").exists()
    step = torch.load(checkpoint, weights_only=True)["step"]
    assert 0 < step < 200
    study(tmp_path, {"full": {}}, length=40, log_every=40)
    assert main(words(path)) == 0
    (entry,) = ledger.read(tmp_path / "runs.jsonl")
    whole = trained(run.recipe)
    assert entry["score"] == whole.task.evaluate(whole.model, whole.data.test, torch.device("cpu")).score
    assert not checkpoint.exists()
    assert main(words(path)) == 0, "nothing is left to do"


def test_once_interrupted_a_process_that_ends_its_run_takes_no_other() -> None:
    """Ctrl-C in the last step of a run has nothing left to stop in it."""
    waiting: queue.Queue[str] = queue.Queue()
    stopping = threading.Event()
    waiting.put("one")
    waiting.put("another")
    assert _taken(waiting, stopping) == "one"
    stopping.set()
    assert _taken(waiting, stopping) is None
    assert waiting.get_nowait() == "another"


def test_mistakes_are_found_before_anything_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = study(tmp_path, {"deep": {"method": "pfb", "cut": "layer9"}}, length=1)
    for more, message in (
        ((), "no module 'layer9'"),
        (("--stages", "two"), "no stage 'two'"),
        (("--workers", "0"), "--workers must be at least 1"),
    ):
        assert main(words(path, *more)) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[Any], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)
