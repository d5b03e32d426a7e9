"""The benchmark: its measures against cases known by hand, its results complete and resumable; the two commands."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("tqdm")

import halfway
from halfway.lab import devices, files
from halfway.lab.bench import measure
from halfway.lab.bench import steps as bench
from halfway.lab.bench.steps import WAYS
from halfway.lab.bench.table import text_table
from halfway.lab.cli import main
from halfway.lab.models import by_name as models

CPU = torch.device("cpu")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class Tiny(nn.Module):
    """Linear layers only, so that every cost is known: the shallow forward is one of five equal products."""

    def __init__(self) -> None:
        super().__init__()
        self.shallow = nn.Linear(64, 64)
        self.deep = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.deep(torch.relu(self.shallow(x)))


class Skipping(Tiny):
    """Something of every sample goes around the cut."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class Shuffle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[torch.randperm(len(x))]


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script benchmarks/zoo.py, which is no part of the package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("zoo")
    for name in ("zoo", "page"):
        sys.modules.pop(name, None)


# --------------------------------------------------------------------- measures


def test_peak_bytes_by_hand() -> None:
    a = torch.ones(1000)

    def step() -> None:
        b = a + 1  # 4000
        c = b.repeat(3)  # 16000
        del b  # 12000
        d = c.repeat(2)  # 36000, the peak
        del c, d
        torch.empty(8000)  # 32000

    assert measure.allocated(step, CPU).peak == pytest.approx(36_000, abs=100)  # a few numbers of the operations' own


def test_peak_bytes_of_a_training_step_by_hand() -> None:
    x = torch.randn(1000, 100)
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Sigmoid())
    model(x)
    # The product and the sigmoid's output; later that output and the gradient of the product. (The gradient of a sum
    # is expanded from one number, and the weight's comes when the output is gone.)
    peak = measure.allocated(lambda: model(x).sum().backward(), CPU).peak
    assert peak == pytest.approx(2 * x.numel() * 4, rel=0.001)


def test_what_was_there_before_does_not_count() -> None:
    kept = torch.ones(100_000)
    assert measure.allocated(lambda: kept.add_(torch.ones(())), CPU).peak < 100


def test_what_is_left_at_the_end_is_counted() -> None:
    kept: list[torch.Tensor] = []
    found = measure.allocated(lambda: kept.append(torch.ones(2000).repeat(2)), CPU)
    assert found.left == pytest.approx(16_000, abs=100)
    assert found.peak == pytest.approx(24_000, abs=100)


def test_a_tape_is_what_the_expensive_operations_gave_for_all_samples() -> None:
    shallow = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.Sigmoid())
    model = nn.Sequential(OrderedDict(shallow=shallow, deep=nn.Linear(32, 4)))
    result = bench.compare(model, "shallow", torch.randn(200, 64), prune_ratio=0.4, rounds=2)
    recorded = 200 * (64 + 32 + 32) * 4  # both products, and the features at the cut
    assert result["ways"]["replay"]["tape_bytes"] == pytest.approx(recorded, rel=0.05)


def test_a_replayed_step_has_the_peak_of_training_on_the_retained_samples() -> None:
    torch.manual_seed(0)
    model, x = models.build("resnet18").train(), torch.randn(16, 3, 64, 64)
    blocker = halfway.ForwardBlocker(model, "layer1", 0.4, reuse="replay")
    steps = {"replay": lambda: bench.train(model, x, blocker), "limit": lambda: bench.train(model, x[:10].clone())}
    peaks = {}
    for way, step in steps.items():
        step()
        model.zero_grad(set_to_none=True)
        peaks[way] = measure.allocated(step, CPU).peak
    assert peaks["replay"] <= 1.02 * peaks["limit"]


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results" / "models").glob("*.json")), ids=lambda path: path.stem)
def test_so_has_every_model_of_the_committed_results(path: Path) -> None:
    ways = json.loads(path.read_text())["ways"]
    assert ways["replay"]["peak_bytes"] <= 1.02 * ways["limit"]["peak_bytes"]


def test_every_way_costs_what_it_should() -> None:
    torch.manual_seed(0)
    result = bench.compare(Tiny(), "shallow", torch.randn(20, 64), prune_ratio=0.4, rounds=2)
    ways = result["ways"]
    # In units of one product: forward of both layers, two gradients of the deep, one of the shallow.
    assert result["shallow_share"] == pytest.approx(1 / 5)
    assert result["retained"] == 12
    assert result["effective_ratio"] == pytest.approx(0.4)
    assert {way: ways[way]["flops"] for way in WAYS} == pytest.approx(
        {"full": 1.0, "index": (2 + 3 * 0.6) / 5, "recompute": 0.6 + 0.2, "replay": 0.6 + 0.4 * 0.2, "limit": 0.6}
    )
    for way in ("full", "recompute", "replay", "limit"):
        assert ways[way]["flops_minus_predicted"] == pytest.approx(0)
        assert ways[way]["wall_minus_predicted"] == ways[way]["wall"]["median"] - ways[way]["predicted"]
    assert ways["full"]["wall"] == {"median": 1.0, "q1": 1.0, "q3": 1.0}
    assert ways["limit"]["peak"] < 1
    assert list(ways["full"]["phases"]) == ["shallow", "rest"]
    assert list(ways["replay"]["phases"]) == ["probe", "selection", "replayed", "rest"]
    assert sum(ways["full"]["phases"].values()) == pytest.approx(1)
    assert "replayed shallow" in text_table(result)


def test_comparing_leaves_no_hook_on_the_model() -> None:
    model = Tiny()
    bench.compare(model, "shallow", torch.randn(20, 64), rounds=2)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_clock_tells_phases_apart() -> None:
    clock = measure.Clock(CPU)

    def step() -> None:
        time.sleep(0.01)
        clock.mark()
        time.sleep(0.2)

    first, second = clock.time(step).phases
    assert 0.01 <= first < 0.2 <= second


def test_what_cannot_be_run_is_said() -> None:
    skipping = bench.compare(Skipping(), "shallow", torch.randn(20, 64), rounds=2)
    assert "unavailable" in skipping["ways"]["index"]
    assert skipping["ways"]["replay"]["flops_minus_predicted"] == pytest.approx(0)
    assert "n/a" in text_table(skipping)


def test_a_model_that_cannot_be_replayed_says_why() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), Shuffle()), nn.Linear(64, 64))
    result = bench.compare(model, "0", torch.randn(20, 64), rounds=2)
    assert "randperm" in result["ways"]["replay"]["unavailable"]
    assert "wall" in result["ways"]["recompute"]
    assert "randperm" in text_table(result)


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 rounds"):
        bench.compare(Tiny(), "shallow", torch.randn(20, 64), rounds=1)


# ---------------------------------------------------------------------- results


def test_results_are_complete_resume_and_render(
    zoo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_FEATURES", (16, 2, 2))
    cases = [zoo.Case(key, "Tiny", Tiny, "shallow", (64,), batch=20) for key in ("one", "two")]
    models_folder = tmp_path / "models"
    assert zoo.run_cases(cases[:1], tmp_path, "command", rounds=2) == ["one"]
    first = (models_folder / "one.json").read_text()
    assert zoo.run_cases(cases, tmp_path, "command", rounds=2) == ["two"]
    assert (models_folder / "one.json").read_text() == first
    assert zoo.run_cases(cases, tmp_path, "command", rounds=2, fresh=True) == ["one", "two"]
    assert sorted(p.name for p in models_folder.iterdir()) == ["one.json", "two.json"]
    result = json.loads(first)
    assert result["command"] == "command --only one --rounds 2"
    assert result["input"] == [20, 64]
    assert {"halfway", "torch", "python"} <= result["versions"].keys()
    assert {"cpu", "cores", "device"} == result["machine"].keys()
    assert {"date", "threads", "rounds", "seed", "title", "cut", "shallow_share"} <= result.keys()
    files.write_json(tmp_path / "selection.json", bench.selection_overhead(0.01, rounds=2))
    page = zoo.page.render(tmp_path)
    assert page.count("Tiny, `shallow`") == 8
    assert "`command --only two --rounds 2`" in page
    assert "## The selection itself" in page


def test_the_zoo_writes_the_page_of_its_own_committed_results(
    zoo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left to measure; files of other benchmarks in the folder are left alone."""
    shutil.copytree(BENCHMARKS / "results", tmp_path / "results")
    (tmp_path / "results" / "README.md").unlink()
    monkeypatch.setattr(sys, "argv", ["zoo.py", "--out", str(tmp_path / "results")])
    assert zoo.main() == 0
    written = (tmp_path / "results" / "README.md").read_text()
    assert written == (BENCHMARKS / "results" / "README.md").read_text(), "python benchmarks/page.py writes it again"
    assert all(f"{case.title}, `{case.at}`" in written for case in zoo.CASES)


def test_an_interrupted_write_leaves_the_old_result(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        files.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


# --------------------------------------------------------------------- commands


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model in the current directory, which is not on the path."""
    code = """
        from torch import nn
        def make():
            return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        def number():
            return 1
        def values():
            import torch
            class Reads(nn.Sequential):
                def forward(self, x):
                    return super().forward(x * float(x.sum() != 0))
            return Reads(nn.Linear(4, 4), nn.Linear(4, 4))
    """
    lines = [line[8:] for line in code.splitlines()]
    (tmp_path / "own_halfway_model.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    return "own_halfway_model"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_layers_of_an_own_model(own_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "layers",
        f"{own_model}:make",
        "--input",
        "5",
        "--dtype",
        "int64",
        "--schedule",
        "10:",
        "--length",
        "20",
    )
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert "20 epochs, pruned in [10, 20)" in out
    code, out, _ = run(capsys, *arguments, "--json")
    rows = json.loads(out)["layers"]
    assert [row["name"] for row in rows] == ["0", "1"]
    assert rows[0]["step"]["0.5"] == 0.5
    assert rows[0]["run"]["0.5"] == 0.75
    assert rows[1]["output_shape"] == [5, 8]


def test_layers_of_a_model_that_reads_values_are_counted_on_the_cpu(
    own_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "layers", f"{own_model}:values", "--input", "4")
    assert code == 0
    assert "Reads" in out
    assert "counted on the CPU" in err


def test_bench_of_an_own_model(own_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("bench", f"{own_model}:make", "--at", "1", "--input", "5", "--dtype", "int64", "--batch", "10")
    code, out, _ = run(capsys, *arguments, "--rounds", "2")
    assert code == 0
    assert "6 of 10 samples retained" in out
    code, out, _ = run(capsys, *arguments, "--rounds", "2", "--json")
    assert json.loads(out)["ways"]["replay"]["flops_minus_predicted"] == pytest.approx(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layers", "{own}:mak"], "has no 'mak'; the closest are make"),
        (["layers", "{own}:number"], "gave a int, not a torch.nn.Module"),
        (["layers", "{own}:make"], "does not train on one tensor of torch.float32"),
        (["layers", "{own}:make", "--input", "5,x"], "--input takes numbers with commas"),
        (["layers", "{own}:make", "--input", "5", "--dtype", "integer"], "unknown dtype 'integer'"),
        (["layers", "{own}:make", "--input", "5", "--size", "5"], "--size is for square RGB images"),
        (["layers", "{own}:make", "--input", "5", "--schedule", "8:5"], "--schedule takes START:STOP"),
        (["layers", "{own}:make", "--input", "5", "--batch", "1"], "--batch must be at least 2"),
        (["layers", "no_such_package:make"], "No module named 'no_such_package'"),
        (["bench", "{own}:make", "--at", "7", "--input", "5", "--dtype", "int64"], "no module '7'"),
    ],
)
def test_mistakes_are_one_line(
    own_model: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, _, err = run(capsys, *(a.format(own=own_model) for a in arguments))
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prune-ratio", "0"], "a prune_ratio of 0.0 prunes none of 10 samples, so there is nothing to compare"),
        (["--prune-ratio", "0.04"], "take a larger ratio or a larger batch"),
        (["--prune-ratio", "nan"], "must be in [0, 1), got nan"),
        (["--device", "tpu"], "--device takes cpu, cuda or cuda:N, got 'tpu'"),
        (["--device", "meta"], "--device takes cpu, cuda or cuda:N, got 'meta'"),
        (["--device", "cuda"], "--device cuda: torch finds no CUDA device here; leave it out, or take --device cpu"),
    ],
)
def test_bench_refuses_what_it_cannot_measure(
    own_model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    arguments = ("bench", f"{own_model}:make", "--at", "1", "--input", "5", "--dtype", "int64", "--batch", "10")
    code, _, err = run(capsys, *arguments, *options)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_device_is_one_that_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.named("cpu") == devices.named("cpu:0") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.named("cuda") == torch.device("cuda")
    assert devices.named("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"finds 2 CUDA device\(s\) here, cuda:0 to cuda:1"):
        devices.named("cuda:2")


def test_unknown_names_get_close_ones() -> None:
    pytest.importorskip("torchvision")
    with pytest.raises(ValueError, match="no model 'resnet5O'; the closest are resnet50"):
        models.build("resnet5O")


def test_without_the_libraries_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_library", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[lab\]' in a checkout of halfway"):
        models.build("resnet50")


def test_models_are_never_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a download")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", refuse)
    monkeypatch.setattr("torchvision._internally_replaced_utils.load_state_dict_from_url", refuse)
    with torch.device("meta"):
        assert models.build("deeplabv3_resnet50", aux_loss=True).aux_classifier is not None
        assert models.build("vit_b_16", size=96).image_size == 96


@pytest.mark.parametrize(
    ("name", "size"),
    [("inception_v3", 299), ("efficientnet_b1", 240), ("resnet50", 224), ("r3d_18", 224), ("deeplabv3_resnet50", 224)],
)
def test_the_default_size_is_what_the_model_is_made_for(name: str, size: int) -> None:
    pytest.importorskip("torchvision")
    assert models.Source(name, None, None, "float32").shape == (3, size, size)


@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
def test_layers_of_inception_are_those_of_its_trunk(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchvision")
    code, out, _ = run(capsys, "layers", "inception_v3", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["input"] == [3, 299, 299]
    names = [row["name"] for row in found["layers"]]
    assert {"Conv2d_1a_3x3", "Mixed_6e", "Mixed_7c"} <= set(names)
    assert not [name for name in names if name.startswith("AuxLogits")]


def test_timm_models_take_the_image_size() -> None:
    pytest.importorskip("timm")
    source = models.Source("vit_tiny_patch16_384", None, None, "float32")
    assert source.shape == (3, 384, 384)
    with torch.device("meta"):
        assert models.build("vit_tiny_patch16_384", size=96).patch_embed.img_size == (96, 96)
        models.build("resnet18d", size=96)  # does not care


def test_compiled_ways_do_what_they_are_named_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    compiled = importlib.import_module("compiled")
    torch._dynamo.reset()
    result = compiled.compare(compiled._tiny().train(), "0", torch.randn(10, 3, 8, 8), 0.4, 2, "eager", None)
    assert result["regions"] == ["1", "2"]
    flops = {way: entry["flops"] for way, entry in result["ways"].items()}
    assert flops["eager, full"] == flops["compiled, full"] == 1
    assert flops["eager, replay"] == flops["compiled, replay"] < flops["compiled, recompute"] < 1
    for name in ("compiled", "page"):
        sys.modules.pop(name, None)
