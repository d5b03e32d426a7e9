"""What people do around a training step: each is the same as training on the retained samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfway import Density, ForwardBlocker

N, CLASSES = 16, 5
GROUP = "the training loop"


class Net(nn.Module):
    def __init__(self, checkpointed: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.drop = nn.Dropout(dropout)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 9, CLASSES)
        self.cut = nn.Identity()
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self._part(self._shallow, "shallow", x)
        x = self._part(self.body, "deep", self.cut(x))
        return self.head(x)

    def _shallow(self, x: Tensor) -> Tensor:
        return self.drop(self.stem(x))

    def _part(self, part: Callable[[Tensor], Tensor], name: str, x: Tensor) -> Tensor:
        return checkpoint(part, x, use_reentrant=False) if name == self.checkpointed else part(x)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(N, 3, 8, 8, generator=generator), torch.randint(0, CLASSES, (N,), generator=generator)


def blocked(model: nn.Module, **kwargs: Any) -> ForwardBlocker:
    return ForwardBlocker(model, "cut", 0.4, selector=Density(num_centroids=8), **kwargs)


def mixed(x: Tensor, y: Tensor, cutmix: bool) -> tuple[Tensor, Tensor]:
    """Mixup or CutMix with soft labels, as torchvision has them."""
    v2 = pytest.importorskip("torchvision.transforms.v2")
    transform = v2.CutMix(num_classes=CLASSES) if cutmix else v2.MixUp(num_classes=CLASSES)
    return transform(x, y)


def plain(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


def clipped(model: nn.Module, x: Tensor, y: Tensor) -> None:
    plain(model, x, y)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def weighted(model: nn.Module, x: Tensor, y: Tensor) -> None:
    weights = 1 + y.float()
    (weights * F.cross_entropy(model(x), y, reduction="none")).mean().backward()


def sam(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Sharpness-aware minimisation: a second pass at weights that went uphill."""
    plain(model, x, y)
    with torch.no_grad():
        steps = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in model.parameters()]
        for p, step in zip(model.parameters(), steps, strict=True):
            p.add_(step)
    model.zero_grad()
    plain(model, x, y)
    with torch.no_grad():
        for p, step in zip(model.parameters(), steps, strict=True):
            p.sub_(step)


LOOPS: dict[str, tuple[Callable[[nn.Module, Tensor, Tensor], None], Callable[[Tensor, Tensor], Any]]] = {
    "plain": (plain, lambda x, y: (x, y)),
    "gradient clipping": (clipped, lambda x, y: (x, y)),
    "per-sample loss weights": (weighted, lambda x, y: (x, y)),
    "SAM, a second pass": (sam, lambda x, y: (x, y)),
    "mixup before the blocker, soft labels": (plain, lambda x, y: mixed(x, y, False)),
    "CutMix before the blocker, soft labels": (plain, lambda x, y: mixed(x, y, True)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "fused AdamW": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_a_loop_trains_as_on_the_retained_samples(name: str, optimizer_name: str, feature) -> None:
    loop, prepare = LOOPS[name]
    model = Net()
    blocker = blocked(model)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for step in range(4):
        x, y = prepare(*batch(step))
        reference = copy.deepcopy(model)
        reference.zero_grad()
        x_retained, y_retained = blocker(x, y)
        assert blocker.last is not None
        optimizer.zero_grad()
        loop(model, x_retained, y_retained)
        loop(reference, x[blocker.last.indices], y[blocker.last.indices])
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-6)
        optimizer.step()
    assert blocker.stats.steps_replayed == 4
    feature(GROUP, name if optimizer_name == "SGD" else optimizer_name, blocker.stats)


def test_gradient_accumulation(feature) -> None:
    model = Net()
    blocker = blocked(model, reuse="replay")
    reference = copy.deepcopy(model)
    for step in range(3):
        x, y = batch(step)
        x_retained, y_retained = blocker(x, y)
        assert blocker.last is not None
        plain(model, x_retained, y_retained)
        plain(reference, x[blocker.last.indices], y[blocker.last.indices])
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-6)
    feature(GROUP, "gradient accumulation", blocker.stats)


@pytest.mark.parametrize(
    ("where", "dropout", "replays"), [("deep", 0.0, True), ("shallow", 0.0, True), ("shallow", 0.5, False)]
)
def test_activation_checkpointing(where: str, dropout: float, replays: bool, feature) -> None:
    model = Net(where, dropout)
    blocker = blocked(model)
    if not replays:
        with pytest.warns(UserWarning, match="checkpoint"):
            blocker(batch(9)[0])
    for step in range(3):
        x, y = batch(step)
        x_retained, y_retained = blocker(x, y)
        model.zero_grad()
        plain(model, x_retained, y_retained)
        if replays:
            assert blocker.last is not None
            reference = copy.deepcopy(model)
            reference.zero_grad()
            plain(reference, x[blocker.last.indices], y[blocker.last.indices])
            for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-6)
    assert (blocker.stats.steps_replayed == 3) is replays
    what = f"activation checkpointing, {where} part{' with dropout' if dropout else ''}"
    feature(GROUP, what, blocker.stats)


@pytest.mark.filterwarnings("ignore:halfway computes")
@pytest.mark.parametrize("when", ["mixup", ".to(dtype)"])
def test_what_is_done_after_the_blocker_is_computed(when: str, feature) -> None:
    model = Net()
    blocker = blocked(model)
    for step in range(2):
        x, y = blocker(*batch(step))
        x = x.lerp(x.flip(0), 0.3) if when == "mixup" else x.to(torch.float64).to(torch.float32)
        plain(model, x, y)
    assert blocker.stats.steps_replayed == 0
    feature(GROUP, f"{when} between the blocker and the model", blocker.stats)


def test_data_parallel_is_refused(feature) -> None:
    with pytest.raises(TypeError) as caught:
        ForwardBlocker(nn.DataParallel(Net()), "cut", 0.4)
    feature("distributed", "nn.DataParallel", caught.value)
