"""What a cut costs: by the formula, and against what a replayed step really runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfway
from halfway import Schedule
from halfway.costs.cost import Cost, cost, relative_cost
from halfway.costs.layers import layers
from halfway.engine.flops import FlopCounter
from tests.helpers.counted import (
    counted,
    metered,
    needs_torchvision,
    tiny,
    torchvision_model,
)


def test_cost_is_the_formula() -> None:
    x = torch.randn(2, 3, 16, 16)
    meter = metered(tiny(), x)
    share = 2 * 2 * 3 * 3 * 3 * 8 * 16 * 16 / (meter.forward + meter.backward)
    assert cost(tiny(), "stem", 0.5, x) == Cost(share, 0.5 + 0.5 * share, 0.5 + 0.5 * share)
    model = tiny()
    assert cost(model, model.stem, 0.5, x) == cost(model, "stem", 0.5, x)
    assert relative_cost(share, 0.5, replayed=False) == 0.5 + share


def test_the_paper_s_window_limits_a_run() -> None:
    """Even a cut that costs nothing gives 1 - 0.4 * 75 / 90 of the run."""

    class Free(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.ReLU(), nn.Linear(4, 4))

    run = cost(Free(), "0", 0.4, torch.randn(2, 4), schedule=Schedule(5, 80), length=90)
    assert run.step == pytest.approx(0.6)
    assert run.run == pytest.approx(1 - 0.4 * 75 / 90)
    by_step = cost(Free(), "0", 0.4, torch.randn(2, 4), schedule=Schedule(100, unit="step"), length=400)
    assert by_step.run == pytest.approx(1 - 0.4 * 300 / 400)


def test_compiled_and_wrapped_models_are_looked_through() -> None:
    model, x = tiny(), torch.randn(2, 3, 16, 16)
    assert cost(torch.compile(model), "stem", 0.5, x) == cost(model, "stem", 0.5, x)
    assert list(layers(torch.compile(model), x)) == list(layers(model, x))


def test_mistakes_are_named() -> None:
    model, x = tiny(), torch.randn(2, 3, 16, 16)
    with pytest.raises(ValueError, match=r"no module 'sten'.*closest are \['stem'"):
        cost(model, "sten", 0.5, x)
    with pytest.raises(ValueError, match=r"must be in \[0, 1\), got 1"):
        cost(model, "stem", 1.0, x)
    with pytest.raises(ValueError, match=r"pass length=, in epochs"):
        cost(model, "stem", 0.5, x, schedule=Schedule(5, 80))
    with pytest.raises(ValueError, match=r"pass length=, in steps"):
        layers(model, x, schedule=Schedule(5, unit="step"))
    with pytest.raises(ValueError, match="'twice' runs 2 times"):
        cost(model, "twice", 0.5, x)
    model.unused = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="'unused' never runs"):
        cost(model, "unused", 0.5, x)
    with pytest.raises(ValueError, match="no tensor among the model's inputs"):
        layers(model)


def replayed(model: nn.Module, at: str, x: Tensor, prune_ratio: float) -> float:
    """FLOPs of a steady replayed step relative to full training."""
    full = counted(model, x)
    with halfway.ForwardBlocker(model, at, prune_ratio, reuse="replay") as blocker:
        model(blocker(x))
        with FlopCounter() as counter:
            model(blocker(x)).square().mean().backward()
        return counter.total / full


def small_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(image_size=32, patch_size=8, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64)


@needs_torchvision
@pytest.mark.parametrize(
    ("make", "at"),
    [
        (lambda: torchvision_model("resnet18"), "layer1"),
        (lambda: torchvision_model("swin_t"), "features.1"),
        (small_vit, "encoder.layers.encoder_layer_0"),
    ],
)
def test_cost_is_what_a_replayed_step_runs(make: Any, at: str) -> None:
    model, x = make(), torch.randn(10, 3, 32, 32)
    assert replayed(model, at, x, 0.4) == pytest.approx(cost(model, at, 0.4, x).step, abs=0.01)
