"""The folder of a run when something is wrong with it: a full disk, files that are lost, broken or not its own."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("torchmetrics")
pytest.importorskip("tensorboard")

from halfway.lab import files
from halfway.lab.cli import main
from halfway.lab.training import logs, run_folder
from halfway.lab.training.run_folder import RunFolder

SETTINGS = ["data.train_samples=64", "data.test_samples=20", "batch_size=32", "length=3", "window=[1, 3]"]
NET = "model.options={width: 8, blocks: [1, 1, 1, 1]}"


def train(out: Path, *words: str) -> int:
    return main(["train", "tiny-cifar10", "--data", "synthetic", "--out", str(out), *SETTINGS, NET, *words])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def weights(folder: Path) -> dict[str, Any]:
    state = RunFolder(folder).load()
    assert state is not None
    assert state["finished"]
    return state["model"]


def assert_same_weights(one: Path, other: Path) -> None:
    torch.testing.assert_close(weights(one), weights(other), rtol=0, atol=0)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert train(out) == 0
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> RunFolder:
    """A copy of a finished run."""
    shutil.copytree(finished, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def no_room() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


# ------------------------------------------------------------------ a full disk


def test_a_full_disk_is_named_and_costs_one_round(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch.save hides the reason behind "unexpected pos": the file that it writes to must not run full unnoticed."""
    save = torch.save
    rounds: list[int] = []

    class Full:
        def __init__(self, file: Any) -> None:
            self.file, self.left = file, 5000

        def write(self, data: Any) -> int:
            self.left -= len(bytes(data))
            if self.left < 0:
                raise no_room()
            return self.file.write(data)

        def flush(self) -> None:
            self.file.flush()

    def saving(content: Any, file: Any) -> None:
        rounds.append(content["step"])
        save(content, Full(file) if content["step"] == 4 else file)

    monkeypatch.setattr(torch, "save", saving)
    out = tmp_path / "run"
    assert train(out) == 2
    said = capsys.readouterr().err
    assert f"the disk is full: {out / 'last.pt'} could not be written; free some space, then go on: halfway" in said
    assert said.rstrip().endswith("--resume")
    assert rounds == [0, 2, 4]
    state = RunFolder(out).load()
    assert state is not None
    assert state["step"] == 2, "the checkpoint before is whole"
    assert not list(out.glob(".*tmp")), "what was half written does not fill the disk any longer"
    monkeypatch.setattr(torch, "save", save)
    assert train(out, "--resume") == 0
    assert_same_weights(out, finished)
    assert len(RunFolder(out).read_metrics()) == 3


def test_a_disk_that_is_full_when_metrics_are_written_is_named(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = logs.Logs.write

    def half(self: logs.Logs, metrics: dict[str, Any]) -> None:
        if metrics["step"] == 4:
            self._file.write(b'{"round": 2, "st')
            raise no_room()
        write(self, metrics)

    monkeypatch.setattr(logs.Logs, "write", half)
    out = tmp_path / "run"
    assert train(out) == 2
    assert f"the disk is full: {out} could not be written" in capsys.readouterr().err
    monkeypatch.setattr(logs.Logs, "write", write)
    assert len(RunFolder(out).read_metrics()) == 1, "half a line is no round"
    assert train(out, "--resume") == 0
    assert_same_weights(out, finished)


@pytest.mark.parametrize("error", [no_room(), KeyboardInterrupt()])
def test_what_cannot_be_written_leaves_the_old_file_and_nothing_else(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_whole(tmp_path / "a.txt", "old")
    files.write_tensors(tmp_path / "a.pt", {"a": 1})

    def fsync(number: int) -> None:
        raise error

    monkeypatch.setattr("os.fsync", fsync)
    expected = files.DiskFullError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        files.write_whole(tmp_path / "a.txt", "new")
    with pytest.raises(expected):
        files.write_tensors(tmp_path / "a.pt", {"a": 2})
    assert (tmp_path / "a.txt").read_text() == "old"
    assert torch.load(tmp_path / "a.pt", weights_only=True) == {"a": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "a.txt"]


def test_other_errors_of_the_disk_are_not_called_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(number: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.fsync", fsync)
    with pytest.raises(OSError, match="Input/output error") as raised:
        files.write_whole(tmp_path / "a.txt", "new")
    assert not isinstance(raised.value, files.DiskFullError)


# ----------------------------------------------------------- nothing to resume


def test_to_resume_where_there_is_no_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "wrong", "--resume") == 2
    said = capsys.readouterr().err
    assert f"nothing to resume in {tmp_path / 'wrong'}; drop --resume to start there, or give the right folder" in said
    assert not (tmp_path / "wrong").exists()


def test_to_resume_without_the_checkpoint_is_an_error_and_nothing_is_touched(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    run.checkpoint.unlink()
    before = contents(run.path)
    assert train(run.path, "--resume") == 2
    said = capsys.readouterr().err
    assert f"{run.checkpoint} is gone, so there is nothing to resume" in said
    assert "put it back, remove the folder to train from the start, or give the right one with --out" in said
    assert contents(run.path) == before


def test_a_run_killed_before_its_first_checkpoint_is_resumed_from_the_start(run: RunFolder, finished: Path) -> None:
    run.checkpoint.unlink()
    run.metrics.write_text("")
    assert train(run.path, "--resume") == 0
    assert_same_weights(run.path, finished)


def test_there_is_a_checkpoint_before_the_first_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, a run killed between its first metrics and its first checkpoint would look like one that lost it."""
    saved = []
    monkeypatch.setattr(RunFolder, "save", lambda self, state: saved.append((state["step"], len(self.read_metrics()))))
    assert train(tmp_path / "run") == 0
    assert saved == [(0, 0), (2, 1), (4, 2), (6, 3)]


# ----------------------------------------------------------- broken checkpoints


def foreign(path: Path) -> None:
    torch.save({"state_dict": {"weight": torch.zeros(3)}, "epoch": 5}, path)


def a_list(path: Path) -> None:
    torch.save([1, 2], path)


def other_version(path: Path) -> None:
    torch.save({**torch.load(path, weights_only=True), "version": 1}, path)


def other_model(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    torch.save({**state, "model": {"conv1.weight": torch.zeros(3)}}, path)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (foreign, "last.pt is no checkpoint of `halfway train` (it has no 'batches')"),
        (a_list, "last.pt is no checkpoint of `halfway train`"),
        (
            other_version,
            "last.pt has version 1, and this halfway reads version 2; go on with the halfway that wrote it",
        ),
        (other_model, "last.pt does not fit this run (Error(s) in loading state_dict"),
        (empty, "last.pt cannot be read ("),
        (cut_off, "last.pt cannot be read ("),
    ],
)
def test_a_broken_or_foreign_checkpoint_is_named_with_what_to_do(
    damage: Any, message: str, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run.checkpoint)
    before = run.metrics.read_bytes()
    assert train(run.path, "--resume") == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in said
    assert "()" not in said
    assert "remove the folder to train from the start" in said
    assert run.metrics.read_bytes() == before


def test_an_error_without_words_is_named_by_its_kind(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise EOFError

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(ValueError, match=r"last\.pt cannot be read \(EOFError\); put the right file back"):
        run.load()


def test_a_report_names_a_foreign_checkpoint(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    foreign(run.checkpoint)
    assert main(["report", str(run.path)]) == 2
    assert "last.pt is no checkpoint of `halfway train`" in capsys.readouterr().err


@pytest.mark.parametrize("lose", [Path.unlink, lambda path: path.write_text(path.read_text()[:50])])
def test_metrics_that_lost_rounds_are_named_with_what_to_do(
    lose: Any, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    lose(run.metrics)
    before = contents(run.path).keys()
    assert train(run.path, "--resume") == 2
    said = capsys.readouterr().err
    assert (
        "metrics.jsonl is shorter than when last.pt was written, so rounds are missing; put the right file back" in said
    )
    assert contents(run.path).keys() - {".lock"} == before - {".lock"}


def test_a_checkpoint_holds_what_is_asked_of_one(finished: Path) -> None:
    state = RunFolder(finished).load()
    assert state is not None
    assert state.keys() == run_folder.KEYS
    assert [json.loads(line)["step"] for line in (finished / "metrics.jsonl").read_text().splitlines()] == [2, 4, 6]
