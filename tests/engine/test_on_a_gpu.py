"""Replayed steps on a GPU: gradients, no waiting, random numbers, memory. `make gpu` runs these.

What does not need a GPU runs on the CPU as well, so that it is known to work when one arrives.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import halfway
from halfway.lab.bench import steps as bench
from halfway.lab.bench.measure import Clock
from halfway.selectors.base import Candidates, Ranking
from tests.helpers.replays import density, relative_difference, timm_model, vision

on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = pytest.param("cuda", marks=on_a_gpu)
DEVICES = ["cpu", CUDA]


class EverySecond(Ranking):
    """The same rows on every device."""

    name = "every_second"
    needs = "features"

    def importance(self, candidates: Candidates) -> Tensor:
        numbers = torch.arange(candidates.size, device=candidates.features.device)
        return (numbers % 2).float() + numbers / (2 * candidates.size)


class Net(nn.Module):
    """Convolutions with BatchNorm, in place and pooled, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.shallow = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(True), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(True)),
        )
        self.deep = nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(True))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.deep(self.shallow(x)).mean((2, 3)))


def vit() -> nn.Module:
    return timm_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=10)


NETS = {"cnn": (Net, "shallow"), "vit": (vit, "blocks.1")}
# Autocast, memory format, how far gradients may be off those in float64 (rounding moves some values across the kinks of
# ReLU and pooling; rows of other samples would be off by 1), and whether the loss is scaled.
SETTINGS: dict[str, tuple[torch.dtype | None, bool, float, bool]] = {
    "float32": (None, False, 0.02, False),
    "channels_last": (None, True, 0.02, False),
    "bfloat16": (torch.bfloat16, True, 0.3, False),
    "float16": (torch.float16, True, 0.05, True),
}


@pytest.fixture(autouse=True)
def _no_tf32() -> Iterator[None]:
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = convolutions


def step(
    model: nn.Module,
    at: str,
    x: Tensor,
    y: Tensor,
    autocast: torch.dtype | None = None,
    scaled: bool = False,
    reuse: Any = "replay",
) -> tuple[dict[str, Tensor], halfway.Stats]:
    """The gradients of the second step, and what it was."""
    device = x.device.type
    scaler = torch.amp.GradScaler(device, init_scale=256.0, enabled=scaled)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with halfway.ForwardBlocker(model, at, 0.5, selector=EverySecond(), reuse=reuse) as blocker:
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast(device, autocast, enabled=autocast is not None):
                part, targets = blocker(x, y)
                loss = nn.functional.cross_entropy(model(part).float(), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return {n: p.grad.double().cpu() for n, p in model.named_parameters() if p.grad is not None}, blocker.stats


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_of_float64_on_a_cpu(device: str, net: str, setting: str) -> None:
    build, at = NETS[net]
    autocast, channels_last, bound, scaled = SETTINGS[setting]
    model = build().train()
    x, y = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    expected, _ = step(copy.deepcopy(model).double(), at, x.double(), y)
    model.to(device)
    if channels_last:
        model.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    found, stats = step(model, at, x.to(device), y.to(device), autocast, scaled)
    assert stats.steps_replayed == 2
    assert relative_difference(found, expected) < bound


@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
@pytest.mark.parametrize("device", [CUDA])
def test_every_kernel_of_fused_attention_is_replayed(device: str, kernel: str) -> None:
    model = vit().train()
    x, y = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    expected, _ = step(copy.deepcopy(model).double(), "blocks.1", x.double(), y)
    try:
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            found, stats = step(model.to(device), "blocks.1", x.to(device), y.to(device), torch.float16, scaled=True)
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        pytest.skip(f"this card has no {kernel}")
    assert stats.steps_replayed == 2
    assert stats.operations_computed == 0
    assert relative_difference(found, expected) < 0.05


@pytest.mark.parametrize(
    "selector", [density, lambda: "random", lambda: "early_exit"], ids=["density", "random", "exit"]
)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_steady_step_never_waits_for_the_device(device: str, net: str, selector: Callable[[], Any]) -> None:
    """On a CPU it shows that the test itself runs."""
    build, at = NETS[net]
    model = build().train().to(device)
    x, y = torch.randn(32, 3, 32, 32, device=device), torch.randint(10, (32,), device=device)
    chosen = selector()
    blocker = halfway.ForwardBlocker(model, None if chosen == "random" else at, 0.5, selector=chosen)

    def train(steps: int) -> None:
        for _ in range(steps):
            part, targets = blocker(x, y)
            nn.functional.cross_entropy(model(part), targets).backward()

    train(8)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        train(4)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert blocker.stats.steps_recomputed == 0


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_seeds_choose_and_draw_the_same(device: str) -> None:
    """A dropout before the cut draws once for all samples; the device's generator then is where a probe leaves it."""

    def run() -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5)), nn.Linear(16, 4)).train().to(device)
        x = torch.randn(32, 8).to(device)
        rows = []
        with halfway.ForwardBlocker(model, "0", 0.5, selector=density(), seed=5) as blocker:
            for _ in range(4):
                model(blocker(x)).square().sum().backward()
                rows.append(blocker.last.indices.cpu())
        return rows, torch.rand(4, device=device).cpu()

    first, second = run(), run()
    assert all(map(torch.equal, first[0], second[0]))
    assert not all(torch.equal(a, b) for a, b in itertools.pairwise(first[0]))
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("device", [CUDA])
def test_a_replayed_step_needs_less_memory_than_a_full_one(device: str) -> None:
    model = vision().resnet50().train().to(device)
    ways = bench.compare(model, "layer2", torch.randn(32, 3, 128, 128, device=device), rounds=2)["ways"]
    assert ways["replay"]["peak"] < 1
    assert ways["replay"]["peak"] < 1.1 * ways["limit"]["peak"]


@pytest.mark.parametrize("device", DEVICES)
def test_a_clock_times_a_step_and_its_phases(device: str) -> None:
    clock = Clock(torch.device(device))
    x = torch.randn(512, 512, device=device)

    def work() -> None:
        x @ x
        clock.mark()
        for _ in range(20):
            x @ x

    clock.time(work)
    timed = clock.time(work)
    assert len(timed.phases) == 2
    assert 0 < timed.phases[0] < timed.phases[1]
    assert timed.host > 0
    assert timed.total == pytest.approx(sum(timed.phases))
