"""What `halfway.advise` refuses, each time with the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfway
from halfway.advice import advice, advise

from .invented import Ticking, net, pairs

DATA = TensorDataset(torch.zeros(48, 4), torch.arange(48) % 3)


@pytest.fixture(autouse=True)
def _invented_time(monkeypatch: pytest.MonkeyPatch) -> None:
    Ticking.time, Ticking.tick = 0.0, 0.01
    monkeypatch.setattr(advice, "Clock", Ticking)


class Rateless(torch.optim.Optimizer):
    """Finds its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": None})


class NoParameters(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs is the length of the planned training, at least 1"),
        ({"epochs": float("nan")}, "at least 1"),
        ({"prune_ratio": 0}, "prunes nothing; take one such as 0.5"),
        ({"prune_ratio": 1.0}, r"must be in \[0, 1\)"),
        ({"seconds": 0}, "more than 0"),
        ({"model": NoParameters()}, "has no parameters that need a gradient"),
        ({"model": net().requires_grad_(False)}, "has no parameters that need a gradient"),
        ({"model": nn.Linear(4, 3, device="meta")}, "move it to the training's"),
        ({"model": nn.DataParallel(net())}, "use DistributedDataParallel"),
        ({"loader": iter(pairs())}, "can be read only once; pass the DataLoader itself"),
        ({"loader": 3}, "as a DataLoader does"),
        ({"loader": {"x": 1}}, "as a DataLoader does"),
        ({"loader": []}, "the loader yields no batch"),
        ({"loader": [x for x, _ in pairs()]}, "pairs .* are needed"),
        ({"loader": [{"x": x} for x, _ in pairs()]}, "pairs .* are needed"),
        ({"loader": [(x, y.float()) for x, y in pairs()]}, "targets are no classes .* pass loss_fn="),
        ({"loader": pairs(size=1)}, "prunes none of the 1 samples"),
        ({"loader": [*pairs(), (torch.randn(8, 4), torch.full((8,), 7))]}, "a target is no class of the model"),
        (
            {"loader": DataLoader(DATA, batch_sampler=halfway.PrunedBatchSampler(DATA, 8, 0.5))},
            r"prunes already \(PrunedBatchSampler\), .* pass a loader without it",
        ),
        ({"loader": DataLoader(DATA, 8, sampler=halfway.samplers.RS2(DATA, 0.5))}, r"prunes already \(RS2\)"),
        ({"at": "layer9"}, "no module 'layer9'"),
        ({"optimizer": torch.optim.SGD(net().parameters(), lr=0.1)}, "none of the model's parameters"),
        ({"optimizer": "sgd"}, "a torch.optim.Optimizer or a function"),
        ({"loss_fn": lambda out, y: out}, "a scalar or one loss per sample"),
        ({"loss_fn": None}, "a function of .* leave it out for cross-entropy"),
        ({"model": pairs(), "loader": net()}, r"must be a torch.nn.Module, got a list: advise\(model, loader"),
        ({"loader": [(x / 0, y) for x, y in pairs()]}, "the inputs of the first batch hold NaN or inf"),
        ({"loader": pairs(classes=9)}, "has 3 outputs, but a target is class 8"),
        ({"loader": pairs(classes=9), "loss_fn": nn.CrossEntropyLoss()}, "has 3 outputs, but a target is class 8"),
        (
            {"optimizer": lambda parameters: torch.optim.LBFGS(parameters)},
            r"step\(closure\).* such as torch.optim.AdamW",
        ),
        ({"optimizer": lambda parameters: Rateless(parameters)}, "this Rateless has no learning rate"),
        ({"optimizer": lambda parameters: None}, "must return a torch.optim.Optimizer, got a NoneType"),
        ({"autocast": "bf16"}, "autocast must be a torch.dtype such as torch.bfloat16, got 'bf16'"),
        ({"clip_norm": 0}, "clip_norm must be more than 0"),
        ({"clip_norm": float("nan")}, "clip_norm must be more than 0"),
    ],
)
def test_what_cannot_work_is_refused_with_the_fix(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"model": net(), "loader": pairs(), "epochs": 3, "seconds": 8, **change}
    with pytest.raises((TypeError, ValueError), match=message):
        advise(**given)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_it_is_refused_where_nothing_can_be_trained(context: Any) -> None:
    with context(), pytest.raises(RuntimeError, match="outside of torch"):
        advise(net(), pairs(), epochs=3, seconds=8)


def test_several_processes_are_refused_before_they_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="without torchrun"):
        advise(net(), pairs(), epochs=3, seconds=8)
