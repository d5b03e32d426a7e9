"""Controls: fewer steps and smaller batches against loops written by hand, and draws of their own seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("torchvision")
pytest.importorskip("torchmetrics")
pytest.importorskip("tensorboard")

from halfway import ForwardBlocker
from halfway.lab.models import small as nets
from halfway.lab.recipes import controls
from halfway.lab.recipes.predicted_cost import predicted_cost
from halfway.lab.recipes.reading import dump
from halfway.lab.recipes.schema import Recipe, from_dict
from halfway.lab.training import session
from halfway.lab.training.loop import Training
from halfway.lab.training.order import BatchOrder
from halfway.lab.training.run_folder import RunFolder
from halfway.lab.training.run_result import RunResult
from halfway.lab.training.trainable import check_trainable
from tests.helpers.small_training import CPU, assert_same_run, load, same, small, trained


def by_hand(r: Recipe, steps: int, batch_size: int, lr: float) -> dict[str, Tensor]:
    """The plain loop: full data in batches of this size for so many steps."""
    loaded = load(r)
    model = nets.build(r.model.name, 10, r.model.options, None, r.seed).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    policy = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    order = BatchOrder(len(loaded.train), batch_size, r.seed)
    plan = [batch for epoch in range(-(-steps // order.per_epoch)) for batch in order.epoch(epoch)][:steps]
    for x, y, _ in loaded.train.batches(plan):
        F.cross_entropy(model(x.to(memory_format=torch.channels_last)), y, label_smoothing=0.1).backward()
        optimizer.step()
        optimizer.zero_grad()
        policy.step()
    return model.state_dict()


def finished(r: Recipe, path: Path) -> RunResult:
    assert session.train(r, load(r), CPU, RunFolder(path), resume=False, command="x")
    return RunResult.read(path)


# --------------------------------------------------------------------- shorter


def test_shorter_is_the_plain_loop_that_ends_within_an_epoch(tmp_path: Path) -> None:
    # 4 epochs of 5 steps: 0.66 of them are 13 steps, and the one-cycle schedule is over after those.
    r = small(method="shorter", prune_ratio=0.34)
    assert same(trained(r).model.state_dict(), by_hand(r, 13, 32, 0.1))
    run = finished(r, tmp_path / "run")
    assert run.finished
    assert (run.metrics[-1]["step"], run.metrics[-1]["epoch"]) == (13, 2.6)
    assert "score" in run.metrics[-1]
    assert run.method == "shorter"
    assert run.cost == pytest.approx(13 / 20)
    assert run.effective_ratio == (0.0, 0.0), "it prunes nothing"
    assert predicted_cost(r).run == pytest.approx(0.66)


@pytest.mark.parametrize(("name", "final"), [("cosine", 0.001), ("poly", 0.001)])
def test_its_learning_rate_rises_and_falls_in_the_same_shares_of_the_run(name: Any, final: float) -> None:
    rate = {"name": name, "warmup": 1.0, "final": final}

    def rates(**changes: Any) -> list[float]:
        r = small(learning_rate=rate, length=8, **changes)
        training = Training(r, load(r), CPU, show=False)
        found = []
        for _ in range(training.steps):
            found.append(training.optimizer.param_groups[0]["lr"])
            training.optimizer.step()
            training.policy.step()
        return [*found, training.optimizer.param_groups[0]["lr"]]

    whole, half = rates(method="full"), rates(method="shorter", prune_ratio=0.6)
    assert (len(whole), len(half)) == (41, 17)
    assert whole.index(max(whole)) == 4
    assert half.index(max(half)) == 1
    assert half[-1] == pytest.approx(whole[-1]) == pytest.approx(final)


def test_shorter_goes_on_after_an_interruption(tmp_path: Path) -> None:
    r = small(method="shorter", prune_ratio=0.34)
    whole, parts = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "parts")
    for folder in (whole, parts):
        folder.open(r, resume=False)
    trained(r, whole)
    asked = iter([False] * 7 + [True])
    assert not Training(r, load(r), CPU, parts, show=False).run(lambda: next(asked))
    trained(r, parts)
    assert_same_run(whole, parts)


# --------------------------------------------------------------- smaller batches


@pytest.mark.parametrize(("method", "lr"), [("smaller_batch", 0.1), ("smaller_batch_scaled", 0.1 * 20 / 32)])
def test_smaller_batches_take_as_many_steps_through_the_data_in_order(method: str, lr: float, tmp_path: Path) -> None:
    r = small(method=method, prune_ratio=0.375)
    training = trained(r)
    assert (training.steps, training.order.batch_size) == (20, 20), "5 of 8 of 32"
    assert same(training.model.state_dict(), by_hand(r, 20, 20, lr))
    run = finished(r, tmp_path / "run")
    assert run.cost == pytest.approx(20 / 32) == pytest.approx(predicted_cost(r).run)
    assert run.effective_ratio == pytest.approx((0.375, 0.375))
    assert run.metrics[-1]["epoch"] == 2.5, "passes over the data"


def test_its_batches_are_those_of_random_pruning_on_every_number_of_ranks() -> None:
    r = small(method="smaller_batch", prune_ratio=0.3)
    assert [controls.batch_size(r, ranks) for ranks in (1, 2, 4)] == [22, 22, 24]
    assert controls.batch_size(small(method="random", prune_ratio=0.3)) == 32


def test_a_batch_that_is_too_small_is_refused_before_training() -> None:
    from halfway.lab.recipes import reading

    voc = reading.load("tiny-voc").with_settings({"batch_size": 8, "prune_ratio": 0.9, "method": "smaller_batch"})
    with pytest.raises(ValueError, match="1 of 8 samples would be retained per rank, but segmentation needs 2"):
        check_trainable(voc)


# -------------------------------------------------------------- without a window


def test_random_pruning_without_window_is_random_pruning_in_all_epochs() -> None:
    even, everywhere = (
        small(method="random_even", prune_ratio=0.25),
        small(method="random", prune_ratio=0.25, window=[0, None]),
    )
    assert same(trained(even).model.state_dict(), trained(everywhere).model.state_dict())
    assert even.window == (1, 3)
    assert predicted_cost(even).run == 0.75


# ------------------------------------------------------------- seed of the draw


@pytest.mark.parametrize("method", ["random", "rs2"])
def test_another_draw_has_the_same_weights_and_order_and_other_samples(method: str) -> None:
    def chosen(**changes: Any) -> tuple[Tensor, list[int]]:
        r = small(method=method, prune_ratio=0.5, **changes)
        training = Training(r, load(r), CPU, show=False)
        start = torch.cat([p.detach().flatten() for p in training.model.parameters()])
        training.model.train()
        if training.sampler is not None:
            plan, _ = training._plan(1)
            return start, [i for ids, _ in plan for i in ids.tolist()]
        assert training.blocker is not None
        training.blocker.set_epoch(1)
        for x, y, ids in training.data.train.batches(training.order.epoch(1)):
            training.train_step(x, y, ids)
        return start, training.retention._round[1].nonzero().squeeze(1).tolist()

    usual, again, other = chosen(), chosen(selection_seed=0), chosen(selection_seed=5)
    assert all(torch.equal(usual[0], start) for start, _ in (again, other))
    assert usual[1] == again[1], "the usual draw is that of the seed"
    assert usual[1] != other[1]
    if method == "rs2":
        place = {i: k for k, i in enumerate(BatchOrder(160, 32, 0)._shuffled(1).tolist())}
        for _, visited in (usual, other):
            assert sorted(visited, key=place.__getitem__) == visited


def test_runs_from_before_there_was_a_seed_of_the_draw_go_on(tmp_path: Path) -> None:
    r = small(method="random", prune_ratio=0.5)
    folder = RunFolder(tmp_path / "old")
    folder.open(r, resume=False)
    assert "selection_seed: null\n" in dump(r)
    folder.config.write_text(dump(r).replace("selection_seed: null\n", ""))
    folder.check(r, resume=True)
    folder.check(r.with_settings({"selection_seed": 0}), resume=True)
    with pytest.raises(ValueError, match="selection_seed was None, is 5"):
        folder.check(r.with_settings({"selection_seed": 5}), resume=True)
    old = r.as_dict()
    old.pop("selection_seed")
    assert from_dict(old) == r


# ------------------------------------------------------------------ plain losses


def test_selectors_learn_from_plain_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smoothing by 0.5 puts a floor under every loss; the training itself keeps it."""
    told: list[Tensor] = []
    observe = ForwardBlocker.observe

    def spy(blocker: ForwardBlocker, losses: Tensor) -> None:
        told.append(losses)
        observe(blocker, losses)

    monkeypatch.setattr(ForwardBlocker, "observe", spy)
    r = small(method="last_loss", prune_ratio=0.5, label_smoothing=0.5)
    training = Training(r, load(r), CPU, show=False)
    training.model.train()
    assert training.blocker is not None
    training.blocker.set_epoch(0)
    x, y, ids = next(iter(training.data.train.batches(training.order.epoch(0))))
    with torch.no_grad():
        outputs = training.model(x.to(memory_format=torch.channels_last))
    loss = training.train_step(x, y, ids)
    assert torch.allclose(told[0], F.cross_entropy(outputs, y, reduction="none"), atol=1e-5)
    assert float(loss) == pytest.approx(float(F.cross_entropy(outputs, y, label_smoothing=0.5)), abs=1e-5)
