"""The GPU kit, tried out on a CPU: what it measures, what it resumes, and how it says what it could not run."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

pytest.importorskip("torchvision")
pytest.importorskip("tqdm")

from halfway.lab import cli
from tests import ROOT

QUICK = ("--device", "cpu", "--quick")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script benchmarks/gpu.py, which is no part of the package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("gpu")
    for name in ("gpu", "gpu_page", "zoo", "page"):
        sys.modules.pop(name, None)


def run(gpu: ModuleType, folder: Path, *arguments: str) -> int:
    return gpu.main([*QUICK, "--out", str(folder), "--runs", str(folder / "runs"), *arguments])


class Tiny(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))


@pytest.fixture
def in_process(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in this process, which has imported everything already, and ResNet-18 is a tiny one."""

    def shown(command: tuple[str, ...], device: torch.device) -> tuple[str, int]:
        if command[1] != "-m":
            monkeypatch.setattr(sys, "argv", list(command[1:]))
            return "", gpu.zoo.main()
        return "", cli.main(command[3:])

    monkeypatch.setattr(gpu, "_shown", shown)
    monkeypatch.setattr(gpu.zoo, "CASES", (gpu.zoo.Case("resnet18", "ResNet-18", Tiny, "0", (3, 8, 8)),))


@pytest.mark.usefixtures("in_process")
def test_a_model_and_a_recipe_are_measured_once(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ("--only", "resnet18", "speedrun-cifar10-pfb")
    assert run(gpu, tmp_path, *only) == 0
    folder = tmp_path / "cpu"
    step = json.loads((folder / "models" / "resnet18.json").read_text())
    assert step["input"] == [8, 3, 32, 32]
    assert (step["autocast"], step["channels_last"]) == ("bfloat16", True)
    assert step["ways"]["replay"]["host"] > 0
    assert step["command"].startswith("python benchmarks/zoo.py --size 32 --batch 8 --amp --channels-last --only")
    trained = json.loads((folder / "recipes" / "speedrun-cifar10-pfb.json").read_text())
    assert (trained["method"], trained["steps"]) == ("pfb", 4)
    assert 0.5 < trained["cost"] < 1
    page = (folder / "README.md").read_text()
    assert "ResNet-18, `0`" in page
    assert "speedrun-cifar10 | pfb" in page
    assert "Not run" not in page
    before = [path.stat().st_mtime_ns for path in sorted(folder.rglob("*.json")) if path.name != "not_run.json"]
    capsys.readouterr()
    assert run(gpu, tmp_path, *only) == 0
    assert "2 of them have a result" in capsys.readouterr().out
    assert before == [p.stat().st_mtime_ns for p in sorted(folder.rglob("*.json")) if p.name != "not_run.json"]


def test_what_could_not_be_run_is_a_row_with_its_reason(gpu: ModuleType, tmp_path: Path) -> None:
    only = ("--only", "speedrun-cifar10-full", "resnet18")
    assert run(gpu, tmp_path, *only, "--minutes", "-1") == 1
    page = (tmp_path / "cpu" / "README.md").read_text()
    assert page.count("the same command goes on") == 2
    item = gpu.Item("broken", "models", (sys.executable, "-c", "raise ValueError('no such card')"), "b.json", 0.0)
    with pytest.raises(RuntimeError, match="no such card"):
        gpu.run(item, tmp_path, tmp_path, torch.device("cpu"))


def test_without_a_gpu_it_says_how_to_try_it_out(
    gpu: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "--device cpu --quick" in capsys.readouterr().err


def test_an_unknown_item_is_refused(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main([*QUICK, "--only", "resnet1"])
    assert "no such item; there are" in capsys.readouterr().err


def test_the_names_of_cards_are_folders(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 4090 (24/1)")
    assert gpu.card(torch.device("cuda")) == "NVIDIA-GeForce-RTX-4090-24-1"


def test_a_batch_that_does_not_fit_is_halved_and_said_so(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def compare(model: nn.Module, at: str, x: torch.Tensor, **_: object) -> dict[str, int]:
        tried.append(len(x))
        if len(x) > 16:
            raise torch.OutOfMemoryError
        return {}

    monkeypatch.setattr(gpu.zoo.bench, "compare", compare)
    case = gpu.zoo.Case("tiny", "Tiny", lambda: nn.Linear(2, 2), "", (2,), batch=64)
    assert gpu.zoo._fitting(case, 2, 0, gpu.zoo.PLAIN)["halved_from"] == 64
    assert tried == [64, 32, 16]
    monkeypatch.setattr(gpu.zoo, "SMALLEST", 20)
    with pytest.raises(torch.OutOfMemoryError):
        gpu.zoo._fitting(case, 2, 0, gpu.zoo.PLAIN)


@pytest.mark.usefixtures("in_process")
def test_fresh_trains_again_and_reasons_of_other_items_are_theirs(gpu: ModuleType, tmp_path: Path) -> None:
    only = ("--only", "speedrun-cifar10-random")
    assert run(gpu, tmp_path, "--only", "resnet18", "--minutes", "-1") == 1
    assert run(gpu, tmp_path, *only) == 0
    trained = tmp_path / "runs" / "cpu" / "speedrun-cifar10-random" / "last.pt"
    before = trained.stat().st_mtime_ns
    assert run(gpu, tmp_path, *only, "--fresh") == 0
    assert trained.stat().st_mtime_ns > before
    assert "resnet18 | not begun" in (tmp_path / "cpu" / "README.md").read_text()


def test_tests_that_failed_are_run_again(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = ['<failure message="wrong"/>']

    def shown(command: tuple[str, ...], device: torch.device) -> tuple[str, int]:
        report = Path(next(word for word in command if word.startswith("--junitxml=")).split("=")[1])
        report.parent.mkdir(parents=True, exist_ok=True)
        case = f'<testcase classname="tests.x" name="y">{"".join(outcome)}</testcase>'
        report.write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
        return "", len(outcome)

    monkeypatch.setattr(gpu, "_shown", shown)
    assert run(gpu, tmp_path, "--only", "tests") == 1
    assert "1 failed" in (tmp_path / "cpu" / "README.md").read_text()
    outcome.clear()
    assert run(gpu, tmp_path, "--only", "tests") == 0
    assert "1 passed, 0 failed" in (tmp_path / "cpu" / "README.md").read_text()


def test_a_miniature_does_not_touch_the_results(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(gpu, "run", lambda item, folder, runs, device: written.extend([folder, runs]))
    monkeypatch.setattr(gpu.gpu_page, "write", written.append)
    monkeypatch.setattr(gpu, "write_json", lambda path, content: None)
    gpu.main([*QUICK, "--only", "tests"])
    assert written
    assert all(path.is_relative_to(ROOT / "runs" / "gpu-quick") for path in written)


def test_every_model_of_the_zoo_can_be_counted(gpu: ModuleType) -> None:
    """`Case.model` is what benchmarks build them with."""
    pytest.importorskip("segmentation_models_pytorch")
    with torch.device("meta"):
        for case in gpu.zoo.CASES:
            case.model().get_submodule(case.at)


@pytest.mark.slow
def test_everything_in_miniature(gpu: ModuleType, tmp_path: Path) -> None:
    assert run(gpu, tmp_path) == 0
    folder = tmp_path / "cpu"
    assert len(list(folder.rglob("recipes/*.json"))) == len(gpu.EPOCHS) * len(gpu.METHODS)
    assert len(list(folder.rglob("models/*.json"))) == len(gpu.QUICK_MODELS)
    tests = json.loads((folder / "tests.json").read_text())
    assert tests["failed"] == {}
    assert tests["skipped" if not torch.cuda.is_available() else "passed"]
