"""Everything that may interrupt a training, and the folder it is resumed from."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("torchmetrics")
pytest.importorskip("tensorboard")

from halfway.lab.cli import main
from halfway.lab.models import small as nets
from halfway.lab.training import session
from halfway.lab.training.loop import Training
from halfway.lab.training.run_folder import RunFolder
from tests.helpers.small_training import CPU, ENVIRONMENT, SETTINGS, assert_same_run, load, small, trained

# ------------------------------------------------------------------------------------------------- interruptions


# Evaluated at the end only, which an interrupted run does not reach: importing the metrics takes seconds.
LENGTH = ("length=24", "window=[1, 22]", "evaluate_every=24")


def words(out: Path, *more: str) -> list[str]:
    """The arguments of a training in the folder, long enough to be interrupted."""
    arguments = ["train", "tiny-cifar10", "--data", "synthetic", "--prune-ratio", "0.5", "--out", str(out)]
    return [*arguments, *SETTINGS, *LENGTH, *more]


def started(out: Path, **pipes: Any) -> subprocess.Popen[str]:
    """It, in a process of its own that can be interrupted."""
    command = [sys.executable, "-m", "halfway", *words(out)]
    return subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL, text=True, **pipes)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    out = tmp_path_factory.mktemp("run") / "whole"
    assert main(words(out)) == 0
    return RunFolder(out)


@pytest.mark.parametrize("lines", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 3)), 7])
def test_a_run_killed_at_any_moment_resumes_to_the_same_bits(
    uninterrupted: RunFolder, tmp_path: Path, lines: int
) -> None:
    folder = RunFolder(tmp_path / "run")
    with started(folder.path) as process:
        _wait_for(lambda: folder.environment.exists() and _lines(folder) >= lines, process)
        process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert main(words(folder.path, "--resume")) == 0
    assert_same_run(folder, uninterrupted)


def test_ctrl_c_leaves_a_resumable_run_and_says_how_to_go_on(uninterrupted: RunFolder, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with started(folder.path, stdout=subprocess.PIPE) as process:
        _wait_for(lambda: _lines(folder) >= 2, process)
        process.send_signal(signal.SIGINT)
        said = process.communicate()[0]
    assert process.returncode == 130
    assert "to go on: halfway train tiny-cifar10" in said
    assert said.rstrip().endswith("--resume")
    assert main(words(folder.path, "--resume")) == 0
    assert_same_run(folder, uninterrupted)


def test_a_run_can_be_stopped_after_any_step(tmp_path: Path) -> None:
    """In the middle of an epoch, too: its half-finished sums are part of the checkpoint."""
    r = small(prune_ratio=0.5)
    whole = RunFolder(tmp_path / "whole")
    whole.open(r, resume=False)
    trained(r, whole)
    folder = RunFolder(tmp_path / "parts")
    folder.open(r, resume=False)
    loaded = load(r)
    sessions = 0
    while True:
        training = Training(r, loaded, CPU, folder, show=False)
        stops_after = iter([False, False, True])
        done = training.run(lambda: next(stops_after))  # noqa: B023  called within this round of the loop
        training.blocker.remove() if training.blocker is not None else None
        sessions += 1
        if done:
            break
    assert sessions == 6  # 20 steps; a stop is only asked for where no epoch ends
    assert_same_run(folder, whole)


def test_what_was_logged_after_the_checkpoint_is_taken_back(tmp_path: Path) -> None:
    r = small(prune_ratio=0.5)
    whole = RunFolder(tmp_path / "whole")
    whole.open(r, resume=False)
    trained(r, whole)
    folder = RunFolder(tmp_path / "run")
    folder.open(r, resume=False)
    stops = iter([False] * 6 + [True])
    training = Training(r, load(r), CPU, folder, show=False)
    assert not training.run(lambda: next(stops))
    with open(folder.metrics, "a") as file:  # killed between the line and the checkpoint
        file.write('{"round": 9}\n')
    trained(r, folder)
    assert_same_run(folder, whole)


def test_a_crash_while_saving_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.save({"step": 1})

    def half(state: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("the cable is out")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="the cable is out"):
        folder.save({"step": 2})
    assert torch.load(folder.checkpoint, weights_only=True) == {"step": 1}


def test_a_diverged_training_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    r = small(method="full", **{"optimizer.lr": 1e12, "length": 8})
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(FloatingPointError, match=r"diverged.*optimizer\.lr"):
        session.train(r, load(r), CPU, folder, resume=False, command="test")
    state = folder.load()
    assert state is None or all(v.isfinite().all() for v in state["model"].values())


def _lines(folder: RunFolder) -> int:
    """Whole lines of metrics so far; the last one may be half written."""
    return folder.metrics.read_text().count("\n") if folder.metrics.exists() else 0


def _wait_for(condition: Any, process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "it ended before it could be interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ---------------------------------------------------------------------------------------------------- the folder


def test_an_existing_run_is_never_overwritten_without_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = ["train", "tiny-cifar10", "--data", "synthetic", "--out", str(out), *SETTINGS]
    assert main(arguments) == 0
    before = {path: path.read_bytes() for path in out.glob("*") if path.is_file()}
    assert main(arguments) == 2
    assert "--resume" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.glob("*") if path.is_file()} == before
    assert main([*arguments, "--resume", "optimizer.lr=0.3"]) == 2
    assert "optimizer" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0  # finished already


def test_somebody_elses_folder_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    assert main(["train", "tiny-cifar10", "--data", "synthetic", "--out", str(tmp_path), "--resume"]) == 2
    assert "not a run folder" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["thesis.txt"]


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.locked(), pytest.raises(ValueError, match="another process"), RunFolder(tmp_path).locked():
        pass


def test_the_config_of_a_run_repeats_it(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    words = ["--prune-ratio", "0.5", "--seed", "5", "--data", "synthetic"]
    assert main(["train", "tiny-cifar10", *words, "--out", str(first), *SETTINGS]) == 0
    assert main(["train", str(first / "config.yaml"), "--out", str(second)]) == 0
    assert_same_run(RunFolder(first), RunFolder(second))


def test_the_checkpoint_loads_with_weights_only_and_fits_the_model(tmp_path: Path) -> None:
    r = small()
    folder = RunFolder(tmp_path / "run")
    folder.open(r, resume=False)
    trained(r, folder)
    state = torch.load(folder.checkpoint, weights_only=True)
    nets.build(r.model.name, 10, r.model.options, None, 99).load_state_dict(state["model"])
