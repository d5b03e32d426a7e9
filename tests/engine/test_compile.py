"""torch.compile: of the whole model, of its deep part, of its shallow part. The eager backend compiles nothing but
traces and guards everything, which is what matters here."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from halfway import Density, ForwardBlocker

N, CLASSES = 16, 5
GROUP = "torch.compile"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(N, 3, 8, 8, generator=generator), torch.randint(0, CLASSES, (N,), generator=generator)


def compile_part(model: nn.Module, name: str, in_place: bool) -> None:
    part = model.get_submodule(name)
    if in_place:
        part.compile(backend="eager")
    else:
        setattr(model, name, torch.compile(part, backend="eager"))


def is_counted(in_place: bool) -> bool:
    """Whether this version of torch counts what it compiles (2.13 does not, for a submodule compiled in place)."""
    model = Net()
    compile_part(model, "body", in_place)
    model(batch(0)[0])
    counted = frames() > 0
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return counted


def frames() -> int:
    """How many times something was compiled."""
    return torch._dynamo.utils.counters["frames"]["total"]


def train(called: nn.Module, model: nn.Module, blocker: ForwardBlocker, counted: bool = True) -> None:
    """Ten steps; each with the gradients of the retained samples; nothing compiled after the third."""
    compiled = 0
    for step in range(10):
        x, y = batch(step)
        reference = copy.deepcopy(eager(model))
        x_retained, y_retained = blocker(x, y)
        model.zero_grad()
        F.cross_entropy(called(x_retained), y_retained).backward()
        assert blocker.last is not None
        reference.zero_grad()
        F.cross_entropy(reference(x[blocker.last.indices]), y[blocker.last.indices]).backward()
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-5)
        if step == 2:
            compiled = frames()
            assert bool(compiled) is counted
    assert frames() == compiled


def eager(model: nn.Module) -> nn.Module:
    """The model without anything compiled."""
    plain = Net()
    plain.load_state_dict({k.replace("_orig_mod.", ""): v for k, v in model.state_dict().items()})
    return plain


def blocked(model: nn.Module, at: str = "stem") -> ForwardBlocker:
    return ForwardBlocker(model, at, 0.4, selector=Density(num_centroids=8))


def test_a_compiled_model_recomputes_says_so_and_compiles_once(feature) -> None:
    model = Net()
    compiled = torch.compile(model, backend="eager")
    blocker = blocked(compiled)
    with pytest.warns(UserWarning, match="compiled"):
        train(compiled, model, blocker)
    assert blocker.stats.steps_recomputed == 10
    feature(GROUP, "the whole model", blocker.stats)


def test_a_model_compiled_in_place_recomputes(feature) -> None:
    model = Net()
    model.compile(backend="eager")
    blocker = blocked(model)
    with pytest.warns(UserWarning, match="compiled"):
        train(model, model, blocker)
    assert blocker.stats.steps_recomputed == 10
    feature(GROUP, "the whole model, model.compile()", blocker.stats)


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "module.compile"])
def test_a_compiled_deep_part_replays_and_compiles_once(in_place: bool, feature) -> None:
    counted = is_counted(in_place)
    model = Net()
    compile_part(model, "body", in_place)
    blocker = blocked(model)
    train(model, model, blocker, counted)
    assert blocker.stats.steps_replayed == 10
    feature(GROUP, "the deep part only", blocker.stats)


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "module.compile"])
def test_a_compiled_shallow_part_recomputes(in_place: bool, feature) -> None:
    counted = is_counted(in_place)
    model = Net()
    compile_part(model, "stem", in_place)
    blocker = blocked(model)
    with pytest.warns(UserWarning, match="compiled"):
        train(model, model, blocker, counted)
    assert blocker.stats.steps_recomputed == 10
    feature(GROUP, "the shallow part", blocker.stats)


def test_the_default_backend_trains_the_deep_part(feature) -> None:
    model = Net()
    model.body = torch.compile(model.body)
    blocker = blocked(model)
    train(model, model, blocker)
    assert blocker.stats.steps_replayed == 10
    feature(GROUP, "the deep part only, inductor", blocker.stats)
