"""Every selector in every kind of loop that has no trainer: ids go in, losses come back, steps are replayed.

The trainers have such a test each in test_lightning_losses.py and test_transformers_losses.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import halfway
from halfway.selectors import SELECTORS
from tests.helpers import processes
from tests.helpers.matrix import SELECTOR_IN

SAMPLES, BATCH = 48, 12


def data() -> halfway.WithIds:
    generator = torch.Generator().manual_seed(0)
    return halfway.WithIds(TensorDataset(torch.randn(SAMPLES, 3, 32, 32, generator=generator), torch.arange(48) % 5))


def made(name: str) -> halfway.Selector:
    if name == "proxy":
        return SELECTORS[name](model=nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 5)))
    return SELECTORS[name](losses=torch.rand(SAMPLES)) if name.startswith("rho") else SELECTORS[name]()


def cut(name: str, at: str) -> str | None:
    return None if SELECTORS[name].needs == "outputs" else at


def network() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.ReLU())
    return nn.Sequential(stem, nn.Conv2d(6, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))


def train(
    model: nn.Module,
    blocker: halfway.ForwardBlocker,
    batches: Iterable[Any],
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
) -> halfway.Stats:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y, ids in batches:
        x, y = blocker(x, y, ids=ids)
        losses = F.cross_entropy(model(x), y, reduction="none")
        blocker.observe(losses)
        backward(losses.mean())
        optimizer.step()
        optimizer.zero_grad()
    return blocker.stats


def check(name: str, stats: halfway.Stats, steps: int = 4) -> None:
    assert stats.pruned_steps == steps
    assert stats.effective_ratio == 0.5
    assert (stats.steps_replayed, stats.steps_recomputed) == (
        steps if made(name).needs in ("features", "outputs") else 0,
        0,
    )


@pytest.mark.parametrize("name", SELECTORS)
def test_with_accelerate(name: str, feature: Callable[..., None]) -> None:
    accelerate = pytest.importorskip("accelerate")
    from halfway.integrations.accelerate import block

    accelerator = accelerate.Accelerator(cpu=True)
    model, loader = accelerator.prepare(network(), DataLoader(data(), BATCH))
    stats = train(
        model, block(accelerator, model, cut(name, "0"), 0.5, selector=made(name)), loader, accelerator.backward
    )
    check(name, stats)
    feature(f"{SELECTOR_IN}Accelerate", name, stats)


@pytest.mark.parametrize("name", SELECTORS)
def test_with_timm(name: str, feature: Callable[..., None]) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("test_resnet", num_classes=5)
    blocker = halfway.ForwardBlocker(model, cut(name, "layer1"), 0.5, selector=made(name), reuse="replay")
    stats = train(model, blocker, DataLoader(data(), BATCH))
    check(name, stats)
    feature(f"{SELECTOR_IN}timm", name, stats)


def _on(rank: int) -> dict[str, halfway.Stats]:
    found = {}
    for name in SELECTORS:
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(network())
        loader = DataLoader(data(), BATCH, sampler=DistributedSampler(data(), 2, rank))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with halfway.ForwardBlocker(model, cut(name, "0"), 0.5, selector=made(name)) as blocker:
                found[name] = train(model, blocker, loader)
    return found


def test_on_two_processes(feature: Callable[..., None]) -> None:
    for found in processes.run(2, _on):
        for name, stats in found.items():
            check(name, stats, steps=2)
            feature(f"{SELECTOR_IN}torchrun, DDP", name, stats)
