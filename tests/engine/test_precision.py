"""Mixed and low precision, memory formats: where it replays, and that the choice is computed in full precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfway import Density, ForwardBlocker

N, CLASSES = 16, 5
GROUP = "precision and layout"


def net() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.Flatten(),
        nn.Linear(8 * 9, CLASSES),
    )


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(N, 3, 8, 8, generator=generator).to(dtype)
    return x, torch.randint(0, CLASSES, (N,), generator=generator)


def blocked(model: nn.Module, **kwargs: Any) -> ForwardBlocker:
    return ForwardBlocker(model, "0", 0.4, selector=Density(num_centroids=8), **kwargs)


def assert_gradients_of_retained(model: nn.Module, blocker: ForwardBlocker, x: Tensor, loss: Any, rtol: float) -> None:
    reference = copy.deepcopy(model)
    reference.zero_grad()
    assert blocker.last is not None
    loss(reference, x[blocker.last.indices], blocker.last.indices).backward()
    scale = max(p.grad.float().norm() for p in reference.parameters())
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        difference = (found.grad.float() - wanted.grad.float()).norm()
        assert difference <= rtol * (wanted.grad.float().norm() + 1e-2 * scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("around_blocker", [False, True], ids=["around the model only", "around the blocker too"])
def test_autocast_replays_with_the_gradients_of_the_retained_samples(dtype, around_blocker, feature) -> None:
    model = net()
    blocker = blocked(model)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, init_scale=2.0**8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(4):
        x, y = batch(step)
        with torch.autocast("cpu", dtype, enabled=around_blocker):
            x_retained, y_retained = blocker(x, y)
        with torch.autocast("cpu", dtype):
            loss = F.cross_entropy(model(x_retained), y_retained)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)

        def reference(model: nn.Module, x: Tensor, indices: Tensor, y: Tensor = y) -> Tensor:
            with torch.autocast("cpu", dtype):
                return F.cross_entropy(model(x), y[indices])

        assert_gradients_of_retained(model, blocker, x, reference, 0.05)
        scaler.step(optimizer)
        scaler.update()
    assert blocker.stats.steps_replayed == (4 if around_blocker else 3)
    name = f"autocast {str(dtype).removeprefix('torch.')}"
    name += ", GradScaler" if dtype == torch.float16 else ""
    feature(GROUP, f"{name}, {'around the blocker too' if around_blocker else 'around the model only'}", blocker.stats)


def test_a_bf16_model_replays_and_its_samples_are_scored_in_float32(feature) -> None:
    model = net().bfloat16()
    blocker = blocked(model)
    for step in range(4):
        x, y = batch(step, torch.bfloat16)
        x_retained, y_retained = blocker(x, y)
        model.zero_grad()
        F.cross_entropy(model(x_retained), y_retained).backward()
        assert_gradients_of_retained(model, blocker, x, lambda m, x, i, y=y: F.cross_entropy(m(x), y[i]), 0.05)
    assert blocker.last is not None
    assert blocker.last.importance is not None
    assert blocker.last.importance.dtype == torch.float32
    assert blocker.selector.estimator.centroids.dtype == torch.float32
    assert blocker.stats.steps_replayed == 4
    feature(GROUP, "pure bfloat16 model", blocker.stats)


def test_autocast_around_the_blocker_does_not_touch_the_scores() -> None:
    choices = []
    for enabled in (False, True):
        torch.manual_seed(0)
        # The shallow part is out of autocast's reach: only the scoring could be.
        model = nn.Sequential(nn.Sequential(nn.Flatten(), nn.ReLU()), nn.Linear(192, CLASSES))
        blocker = blocked(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            for step in range(3):
                model(blocker(batch(step)[0]))
        choices.append(blocker.last)
    assert torch.equal(choices[0].importance, choices[1].importance)


def test_channels_last_replays(feature) -> None:
    model = net().to(memory_format=torch.channels_last)
    blocker = blocked(model, reuse="replay")
    for step in range(3):
        x, y = batch(step)
        x = x.to(memory_format=torch.channels_last)
        x_retained, y_retained = blocker(x, y)
        assert x_retained.is_contiguous(memory_format=torch.channels_last)
        model.zero_grad()
        F.cross_entropy(model(x_retained), y_retained).backward()
        assert_gradients_of_retained(model, blocker, x, lambda m, x, i, y=y: F.cross_entropy(m(x), y[i]), 1e-5)
    feature(GROUP, "channels_last", blocker.stats)


def test_double_precision_replays(feature) -> None:
    model = net().double()
    blocker = blocked(model, reuse="replay")
    x, y = batch(0, torch.float64)
    x_retained, y_retained = blocker(x, y)
    F.cross_entropy(model(x_retained), y_retained).backward()
    assert_gradients_of_retained(model, blocker, x, lambda m, x, i: F.cross_entropy(m(x), y[i]), 1e-12)
    feature(GROUP, "float64", blocker.stats)


def test_batch_norm_under_autocast_is_as_exact_as_without_halfway() -> None:
    """The replayed features are those of the probe, so gradients differ from float32 no more than autocast itself."""
    norm = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1))
    models = {True: nn.Sequential(norm, nn.GELU(), nn.Flatten(), nn.Linear(8 * 64, CLASSES))}
    models[False] = copy.deepcopy(models[True])
    blockers = {autocast: blocked(model) for autocast, model in models.items()}
    compared = 0
    for step in range(6):
        x, y = batch(step)
        chosen, gradients = {}, {}
        for autocast, model in models.items():
            model.zero_grad()
            x_retained, y_retained = blockers[autocast](x, y)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                F.cross_entropy(model(x_retained), y_retained).backward()
            chosen[autocast] = blockers[autocast].last.indices
            gradients[autocast] = torch.cat([p.grad.flatten() for p in model.parameters()])
        if torch.equal(chosen[True], chosen[False]) and step > 0:
            compared += 1
            assert (gradients[True] - gradients[False]).norm() < 0.05 * gradients[False].norm()
    assert compared
    assert blockers[True].stats.steps_replayed == 5
