"""The Hugging Face Trainer, the real one: what it trains with the mixin is what a loop of one's own would train."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfway
from tests.helpers import processes
from tests.helpers.compiled import compiled_parts

pytest.importorskip("transformers")

from transformers import (
    TrainingArguments,
)

from tests import ROOT
from tests.helpers.hugging_face import (
    GROUP,
    MODELS,
    Blocked,
    Recording,
    Samples,
    arguments,
    assert_as_by_hand,
    assert_equal,
    by_hand,
    trained,
    trainer,
    vit,
)

# ----------------------------------------------------------------------------------------------- what is trained


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_the_usual_loop_would(name: str, tmp_path: Path, feature) -> None:
    make, at, _ = MODELS[name]
    done = trained(tmp_path, make(), data=Samples(text=name == "BERT"), blocking={"at": at})
    assert_as_by_hand(done, name)
    feature(GROUP, f"{name}, cut at `{at}`", done.blocker.stats)


def test_without_pruning_it_is_the_plain_trainer_bit_for_bit(tmp_path: Path) -> None:
    plain = trained(tmp_path, vit(dropout=0.2), kind=Recording)
    blocked = trained(tmp_path, vit(dropout=0.2), blocking={"prune_ratio": 0.0})
    assert_equal(plain.model, blocked.model)
    assert torch.equal(torch.stack(plain.losses), torch.stack(blocked.losses))


def test_accumulated_gradients_are_those_of_the_usual_loop(tmp_path: Path, feature) -> None:
    done = trained(tmp_path, gradient_accumulation_steps=2)
    assert_as_by_hand(done, accumulate=2)
    feature(GROUP, "gradient accumulation", done.blocker.stats)


def test_it_replays_in_bfloat16(tmp_path: Path, feature) -> None:
    done = trained(tmp_path, bf16=True)
    stats = done.blocker.stats
    assert (stats.steps_replayed, stats.steps_recomputed) == (8, 0)
    model = vit()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = by_hand(model, done.batches, ["pixel_values"], "vit.layers.0")
    assert [r.tolist() for r in rows] == [r.tolist() for r in done.rows]
    for (name, a), b in zip(done.model.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=2e-3, msg=name)
    feature(GROUP, "bf16=True", stats)


def test_label_smoothing(tmp_path: Path, feature) -> None:
    done = trained(tmp_path, label_smoothing_factor=0.1)
    assert_as_by_hand(done, label_smoothing=0.1)
    feature(GROUP, "label_smoothing_factor", done.blocker.stats)


def test_a_loss_of_ones_own(tmp_path: Path, feature) -> None:
    class Own(Blocked):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = F.cross_entropy(outputs.logits, labels)
            return (loss, outputs) if return_outputs else loss

    done = trained(tmp_path, kind=Own)
    assert_as_by_hand(done)
    feature(GROUP, "compute_loss overridden", done.blocker.stats)


def test_gradient_checkpointing(tmp_path: Path, feature) -> None:
    done = trained(tmp_path, gradient_checkpointing=True)
    assert_as_by_hand(done)
    feature(GROUP, "gradient_checkpointing=True, no dropout", done.blocker.stats)


@pytest.mark.filterwarnings("ignore:halfway computes the shallow layers twice")
def test_a_compiled_model_is_recomputed(tmp_path: Path, feature) -> None:
    done = trained(tmp_path, torch_compile=True, torch_compile_backend="eager", num_train_epochs=1)
    stats = done.blocker.stats
    assert (stats.steps_replayed, stats.steps_recomputed) == (0, 4)
    assert "compiled" in next(iter(stats.recompute_reasons))
    feature(GROUP, "torch_compile=True", stats)


def test_a_model_compiled_after_the_cut_is_replayed(tmp_path: Path, feature) -> None:
    model = halfway.compile(vit(), at="vit.layers.0", backend="eager")
    done = trained(tmp_path, model)
    assert_as_by_hand(done)
    assert compiled_parts(model) == ["vit.layers.1"]
    feature(GROUP, "halfway.compile", done.blocker.stats)


# ------------------------------------------------------------------------------------------------------- refused


def test_data_parallel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feature) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(TypeError, match=r"nn\.DataParallel splits every batch.*torchrun") as error:
        trainer(tmp_path)
    feature(GROUP, "several GPUs in one process (nn.DataParallel)", error.value)


def test_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    def parallel() -> nn.Module:  # by model_init, which comes behind what the Trainer itself would refuse without ranks
        model = vit()
        model._tp_size = 2
        return model

    with pytest.raises(TypeError, match="2 processes share each batch"):
        trainer(tmp_path, more={"model_init": parallel})


def test_wrong_settings_are_found_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no module 'vit\.layer\.0'.*closest"):
        trainer(tmp_path, blocking={"at": "vit.layer.0"})
    with pytest.raises(TypeError, match="blocking"):
        Blocked(vit(), arguments(tmp_path))


def test_inputs_may_be_said(tmp_path: Path) -> None:
    done = trained(tmp_path, blocking={"inputs": ["pixel_values"]})
    assert_as_by_hand(done)
    with pytest.raises(ValueError, match=r"inputs=\['pixels'\] are not in the batch"):
        trained(tmp_path, blocking={"inputs": ["pixels"]})


# --------------------------------------------------------------------------------------------- several processes


def rank_of_a_job(rank: int, folder: str) -> Any:
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    os.environ.update({name: str(value) for name, value in where.items()})
    done = trained(Path(folder), gradient_accumulation_steps=1, ddp_backend="gloo", per_device_train_batch_size=4)
    assert isinstance(done.model_wrapped, nn.parallel.DistributedDataParallel)
    stats = done.blocker.stats
    retained = [{n: v[rows] for n, v in b.items()} for b, rows in zip(done.batches, done.rows, strict=True)]
    return retained, done.model.state_dict(), (stats.steps_replayed, stats.recompute_reasons)


def test_two_processes_train_what_one_would_with_all_their_retained_samples(tmp_path: Path, feature) -> None:
    results = processes.run(2, rank_of_a_job, str(tmp_path))
    model = vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parts in zip(*(retained for retained, _, _ in results), strict=True):
        assert [len(part["labels"]) for part in parts] == [2, 2]
        both = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        F.cross_entropy(model(pixel_values=both["pixel_values"]).logits, both["labels"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for _, weights, (replayed, reasons) in results:
        assert (replayed, reasons) == (8, {})
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)
    feature(GROUP, "DDP, 2 processes", results[0][2])


EXAMPLE = ROOT / "examples" / "hf_trainer.py"


def assert_told(printed: str) -> None:
    for words in ("effective_ratio=0.40", "steps_replayed=4", "steps_recomputed=0"):
        assert words in printed


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--steps", "4"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert_told(capsys.readouterr().out)


@pytest.mark.slow  # DDP is tested above, and importing transformers takes two processes long
def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*launch, str(EXAMPLE), "--steps", "4"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environment, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert_told(done.stdout)
