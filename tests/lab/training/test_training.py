"""`halfway train`: the loop against one written by hand, and what it writes down."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("torchvision")
pytest.importorskip("torchmetrics")
pytest.importorskip("tensorboard")

from halfway import Density, ForwardBlocker, Schedule
from halfway.lab.cli import main
from halfway.lab.models import small as nets
from halfway.lab.recipes import reading
from halfway.lab.recipes.schema import Recipe
from halfway.lab.training import session
from halfway.lab.training.loop import Training
from halfway.lab.training.order import BatchOrder
from halfway.lab.training.run_folder import RunFolder
from halfway.lab.training.run_result import RunResult
from tests.helpers import processes
from tests.helpers.small_training import (
    CPU,
    ENVIRONMENT,
    SETTINGS,
    load,
    same,
    small,
    trained,
    without_times,
)


def by_hand(r: Recipe, blocked: bool) -> dict[str, Tensor]:
    """What a user would write."""
    loaded = load(r)
    model = nets.build(r.model.name, 10, r.model.options, None, r.seed).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    order = BatchOrder(len(loaded.train), r.batch_size, r.seed)
    policy = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=r.length * order.per_epoch)
    blocker = None
    if blocked:
        selector = Density(noise=0.01, num_centroids=64, dim=128)
        blocker = ForwardBlocker(
            model, "layer1", r.prune_ratio, selector=selector, schedule=Schedule(1, 3), seed=r.seed
        )
    for epoch in range(r.length):
        if blocker is not None:
            blocker.set_epoch(epoch)
        for x, y, _ in loaded.train.batches(order.epoch(epoch)):
            x = x.to(memory_format=torch.channels_last)
            if blocker is not None:
                x, y = blocker(x, y)
            F.cross_entropy(model(x), y, label_smoothing=0.1).backward()
            optimizer.step()
            optimizer.zero_grad()
            policy.step()
    return model.state_dict()


@pytest.mark.parametrize(
    "changes", [{"method": "full"}, {"prune_ratio": 0.0}, {"method": "random", "prune_ratio": 0.0}]
)
def test_without_pruning_it_is_the_plain_loop_bit_for_bit(changes: dict[str, Any]) -> None:
    r = small(**changes)
    training = trained(r)
    assert training.blocker is None
    assert same(training.model.state_dict(), by_hand(r, blocked=False))


def test_pfb_is_the_hand_written_loop_with_a_blocker_bit_for_bit() -> None:
    r = small(prune_ratio=0.5)
    training = trained(r)
    assert same(training.model.state_dict(), by_hand(r, blocked=True))
    assert training.blocker is not None
    stats = training.blocker.stats
    assert (stats.steps_replayed, stats.steps_recomputed) == (2 * 5, 0)
    assert stats.effective_ratio == pytest.approx(0.5 * 2 / 4)


def test_methods_at_one_seed_start_from_the_same_weights_and_see_the_same_batches() -> None:
    starts, batches = [], []
    for method in ("full", "random", "pfb"):
        r = small(method=method, seed=3)
        loaded = load(r)
        training = Training(r, loaded, CPU, show=False)
        starts.append(torch.cat([p.detach().flatten() for p in training.model.parameters()]))
        batches.append(torch.stack([x for x, _, _ in loaded.train.batches(training.order.epoch(1))]))
    assert all(torch.equal(s, starts[0]) for s in starts)
    assert all(torch.equal(b, batches[0]) for b in batches)


def test_it_learns_and_another_seed_learns_otherwise() -> None:
    first, second = (trained(small(method="full", length=12, seed=seed)) for seed in (0, 1))
    score = first.task.evaluate(first.model, first.data.test, CPU).score
    assert score > 40  # of ten classes
    assert not same(first.model.state_dict(), second.model.state_dict())


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    trained(small())
    assert torch.equal(before, torch.get_rng_state())


def test_retention_counts_every_pruned_batch(tmp_path: Path) -> None:
    r = small(prune_ratio=0.25)
    folder = RunFolder(tmp_path / "run")
    folder.open(r, resume=False)
    training = trained(r, folder)
    retention = training.retention
    assert retention.offered.sum() == 2 * 5 * 32
    assert retention.retained.sum() == 2 * 5 * 24
    assert (retention.retained <= retention.offered).all()
    assert (retention.offered == 2).all()  # two pruned epochs, each sample once in each
    by_class = torch.stack(retention.class_offered)
    assert by_class.shape == (4, 10)
    assert by_class.sum(1).tolist() == [0, 160, 160, 0]
    state = folder.load()
    assert state is not None
    assert torch.equal(state["retention"]["retained"], retention.retained)


def test_metrics_say_what_was_spent(tmp_path: Path) -> None:
    r = small(prune_ratio=0.5)
    folder = RunFolder(tmp_path / "run")
    session.train(r, load(r), CPU, folder, resume=False, command="test")
    result = RunResult.read(folder.path)
    assert result.finished
    assert [m["step"] for m in result.metrics] == [5, 10, 15, 20]
    assert ["score" in m for m in result.metrics] == [False, True, False, True]
    assert result.effective_ratio == (pytest.approx(0.5), pytest.approx(0.25))
    step, whole = result.flops
    assert 0.5 < step < 0.6
    assert whole == pytest.approx(0.5 * step + 0.5)
    assert 0 < result.waited < 1
    assert list((folder.path / "tensorboard").iterdir())


def test_a_segmentation_recipe_trains_by_steps_and_ends_with_several_scales(tmp_path: Path) -> None:
    r = reading.load("tiny-voc").with_settings(
        {
            "root": "synthetic",
            "data.size": [32, 32],
            "data.train_samples": 40,
            "model.options": {"width": 4, "blocks": [1, 1, 1, 1], "head_width": 8},
            "length": 12,
            "window": [2, 10],
            "log_every": 5,
            "evaluate_every": 2,
        }
    )
    folder = RunFolder(tmp_path / "run")
    assert session.train(r, load(r), CPU, folder, resume=False, command="test")
    metrics = folder.read_metrics()
    assert [m["step"] for m in metrics] == [5, 10, 12]
    assert metrics[-1]["pruned_steps"] == metrics[-1]["replayed"] == 8
    assert "multi_scale" in metrics[-1]
    assert "multi_scale" not in metrics[0]


# ------------------------------------------------------------------------------------------------------ mistakes


def test_a_batch_that_leaves_segmentation_one_sample_is_refused_before_any_work() -> None:
    r = reading.load("tiny-voc").with_settings({"root": "synthetic", "batch_size": 4, "prune_ratio": 0.7})
    with pytest.raises(ValueError, match=r"1 of 4 samples.*BatchNorm.*batch_size"):
        Training(r, load(r), CPU, show=False)


def test_missing_data_is_an_error_that_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["train", "tiny-cifar10", "--data", str(tmp_path / "nowhere"), "--out", str(out)]) == 2
    assert "halfway data cifar10 --to" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prune-ratio", "1.5"], "in [0, 1)"),
        (["--method", "magic"], "full, pfb"),
        (["optimizer.Lr=3"], "did you mean lr"),
        (["--epochs", "0"], "at least 1"),
        (["cut=layer9"], "layer9"),
        (["density.nois=1"], "did you mean noise"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_fix(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "tiny-cifar10", "--data", "synthetic", "--out", str(tmp_path / "run"), *SETTINGS]
    assert main([*arguments, *words]) == 2
    assert said in capsys.readouterr().err


# --------------------------------------------------------------------------------------------- several processes


Outcome = tuple[list[dict[str, Any]], Tensor, int]


def _on_two_ranks(rank: int, *jobs: tuple[str, int | None]) -> list[Outcome]:
    """Trainings one after the other: the folder of each, and after how many steps it stops."""
    return [_train_in(folder, stop_after) for folder, stop_after in jobs]


def _train_in(folder: str, stop_after: int | None) -> Outcome:
    r = small(prune_ratio=0.5)
    training = Training(r, load(r), CPU, RunFolder(folder), show=False)
    if stop_after is not None:
        # A stop between rounds would be asked for on both ranks; here the training simply ends.
        steps = iter(range(10**6))
        original = training.train_step

        def limited(x: Tensor, y: Tensor, ids: Tensor) -> Tensor:
            if next(steps) == stop_after:
                raise KeyboardInterrupt
            return original(x, y, ids)

        training.train_step = limited  # type: ignore[method-assign]
        with contextlib.suppress(KeyboardInterrupt):
            training.run()
    else:
        assert training.run()
    weights = torch.cat([p.detach().flatten() for p in training.model.parameters()])
    retained = int(training.retention.retained.sum())
    return RunFolder(folder).read_metrics(), weights, retained


def test_two_processes_agree_and_resume_to_the_same_bits(tmp_path: Path) -> None:
    r = small(prune_ratio=0.5)
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    for folder in (whole, parts):
        folder.open(r, resume=False)
    jobs = (str(whole.path), None), (str(parts.path), 12), (str(parts.path), None)
    first, second = processes.run(2, _on_two_ranks, *jobs)
    (metrics, w0, retained), _, (resumed, weights, _) = first
    w1 = second[0][1]
    assert torch.equal(w0, w1)
    assert retained == 2 * 5 * 16
    assert metrics[-1]["seen"] == 4 * 160
    alone = Training(r, load(r), CPU, show=False)
    state = whole.load()
    assert state is not None
    alone.model.load_state_dict(state["model"])
    assert metrics[-1]["score"] == pytest.approx(alone.task.evaluate(alone.model, alone.data.test, CPU).score)
    assert torch.equal(weights, w0)
    assert without_times(resumed) == without_times(metrics)


@pytest.mark.slow
def test_the_command_runs_under_torchrun(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["train", "tiny-cifar10", "--data", "synthetic", "--prune-ratio", "0.5", "--out", str(out), *SETTINGS]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "halfway"]
    done = subprocess.run([*launch, *words], env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("top-1 accuracy") == 1
    assert RunResult.read(out).finished
