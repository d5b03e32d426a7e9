"""Trainers take a batch sampler as it is: they begin its epochs, shard it, and skip what was trained on."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import halfway
from tests.helpers import processes

N, B = 96, 16


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(N, 6, generator=generator), torch.arange(N) % 3)


def batches_of(source: Any = None, selector: str = "last_loss") -> halfway.PrunedBatchSampler:
    return halfway.PrunedBatchSampler(source if source is not None else data(), B, 0.5, selector=selector)


def loader_of(batches: halfway.PrunedBatchSampler) -> DataLoader:
    return DataLoader(halfway.WithIds(data()), batch_sampler=batches)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))


def by_hand(epochs: int, batches: halfway.PrunedBatchSampler) -> tuple[list[list[int]], list[Tensor]]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    steps = []
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        for x, y, ids in loader_of(batches):
            steps.append(ids.tolist())
            losses = F.cross_entropy(model(x), y, reduction="none")
            batches.observe(ids, losses)
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
    return steps, [p.detach() for p in model.parameters()]


# ----------------------------------------------------------------------------- Lightning


class Module(L.LightningModule):
    def __init__(self, batches: halfway.PrunedBatchSampler) -> None:
        super().__init__()
        self.net, self.batches, self.steps = net(), batches, []

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y, ids = batch
        self.steps.append(ids.tolist())
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        self.batches.observe(ids, losses)
        return losses.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fit(batches: halfway.PrunedBatchSampler, tmp: str, **options: Any) -> Module:
    module = Module(batches)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", default_root_dir=tmp, enable_model_summary=False, **quiet, **options)
    trainer.fit(module, loader_of(batches))
    return module


def test_lightning_trains_as_a_loop_of_ones_own(tmp_path) -> None:
    module = fit(batches_of(), str(tmp_path), max_epochs=3)
    steps, parameters = by_hand(3, batches_of())
    assert module.steps == steps
    for a, b in zip(module.parameters(), parameters, strict=True):
        assert torch.equal(a, b)


def _environment(rank: int) -> None:
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in where.items()})


def _lightning_on(rank: int, tmp: str) -> Any:
    _environment(rank)
    options = {"devices": 2, "strategy": "ddp", "max_epochs": 2}
    with pytest.raises(TypeError, match="use_distributed_sampler=False"):
        fit(batches_of(), tmp, **options)
    batches = batches_of(DistributedSampler(data(), 2, rank))
    return fit(batches, tmp, use_distributed_sampler=False, **options).steps


def test_lightning_on_two_processes_needs_its_own_samplers_switched_off(tmp_path) -> None:
    steps = processes.run(2, _lightning_on, str(tmp_path))
    assert len(steps[0]) == len(steps[1]) == 6
    for mine, other in zip(*steps, strict=True):
        assert len(mine) == len(other) == B // 2
        assert not set(mine) & set(other)


# ---------------------------------------------------------------------------- Accelerate


@pytest.fixture
def _anew() -> Any:
    """Accelerate keeps its settings for the whole process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def accelerated(
    epochs: int, batches: halfway.PrunedBatchSampler, skip: int = 0
) -> tuple[list[list[int]], list[Tensor]]:
    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(batches))
    steps = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for x, y, ids in skip_first_batches(loader, skip) if skip and not epoch else loader:
            steps.append(ids.tolist())
            losses = F.cross_entropy(model(x), y, reduction="none")
            batches.observe(ids, losses)
            optimizer.zero_grad()
            accelerator.backward(losses.mean())
            optimizer.step()
    return steps, [p.detach() for p in model.parameters()]


@pytest.mark.usefixtures("_anew")
def test_accelerate_trains_as_a_loop_of_ones_own() -> None:
    found, expected = accelerated(3, batches_of()), by_hand(3, batches_of())
    assert found[0] == expected[0]
    for a, b in zip(found[1], expected[1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("_anew")
def test_accelerate_skips_batches_that_were_trained_on() -> None:
    whole = [list(map(int, batch)) for batch in batches_of()]
    assert accelerated(1, batches_of(), skip=2)[0] == whole[2:]


def _accelerate_on(rank: int, selector: str) -> Any:
    _environment(rank)
    batches = batches_of(selector=selector)
    steps, parameters = accelerated(3, batches)
    return steps, parameters, batches.state_dict()["epoch"]["retained"]


@pytest.mark.parametrize("selector", [pytest.param("random", marks=pytest.mark.slow), "last_loss"])
def test_accelerate_gives_every_process_other_batches_of_one_draw(selector: str) -> None:
    (steps_0, parameters_0, drawn_0), (steps_1, parameters_1, drawn_1) = processes.run(2, _accelerate_on, selector)
    assert torch.equal(drawn_0, drawn_1), "every process walks all batches"
    assert len(steps_0) == len(steps_1) == 3 * N // B // 2
    for epoch in range(3):
        part = slice(3 * epoch, 3 * epoch + 3)
        used = [i for step in (*steps_0[part], *steps_1[part]) for i in step]
        assert len(used) == len(set(used)) == N // 2
    for a, b in zip(parameters_0, parameters_1, strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------- Hugging Face's Trainer


def test_hugging_faces_trainer_takes_it_from_get_train_dataloader(tmp_path) -> None:
    from transformers import Trainer, TrainingArguments

    batches = batches_of()
    steps: list[list[int]] = []

    class WithPruning(Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return self.accelerator.prepare(DataLoader(halfway.WithIds(data()), batch_sampler=batches))

        def compute_loss(self, model: nn.Module, inputs: Any, **_: Any) -> Tensor:  # type: ignore[override]
            x, y, ids = inputs
            steps.append(ids.tolist())
            losses = F.cross_entropy(model(x), y, reduction="none")
            batches.observe(ids, losses)
            return losses.mean()

        def _prepare_inputs(self, inputs: Any) -> Any:
            return inputs

    args = TrainingArguments(str(tmp_path), num_train_epochs=3, save_strategy="no", report_to="none", use_cpu=True)
    args = TrainingArguments(**{**args.to_dict(), "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0})
    args.lr_scheduler_type = "constant"  # type: ignore[assignment]
    WithPruning(model=net(), args=args, train_dataset=data()).train()
    assert steps == by_hand(3, batches_of())[0]
    assert batches.stats.steps == 18
