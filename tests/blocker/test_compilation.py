"""`halfway.compile`: what comes after the cut is compiled, once per batch size; what comes before is replayed."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import halfway
from halfway import ForwardBlocker, Schedule
from tests.helpers import processes
from tests.helpers.compiled import (
    Block,
    Counting,
    N,
    ResNet,
    ViT,
    assert_same_gradients,
    batch,
    blocked,
    compiled_parts,
    first_call,
    pair,
    step,
)

GROUP = "torch.compile"
needs_a_limit_per_function = pytest.mark.skipif(
    "recompile_limit" not in inspect.signature(torch.compile).parameters, reason="torch.compile has one limit for all"
)
MODELS = {"resnet": (ResNet, "stem", 3), "vit": (ViT, "blocks.1", 3)}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """Beyond its limit dynamo would stop compiling with a line in a log; here that is an error."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------------ the whole of it


@pytest.mark.parametrize("name", MODELS)
def test_one_graph_per_region_and_size_the_gradients_of_eager_training_and_every_step_replayed(
    name: str, feature
) -> None:
    build, at, regions = MODELS[name]
    backend = Counting("eager")
    eager, model = pair(build(), at, backend=backend, fullgraph=True)
    blockers = [blocked(m, at, schedule=Schedule(1, 3)) for m in (eager, model)]
    graphs = []
    for epoch in range(4):
        for size in (N, N, N - 5):  # the last batch is smaller
            x, y = batch(10 * epoch + size, size)
            for m, blocker in zip((eager, model), blockers, strict=True):
                blocker.set_epoch(epoch)
                step(m.train(), blocker, x, y)
            assert_same_gradients(model, eager)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(x), eager.eval()(x))
        graphs.append(backend.graphs)
    # Full batches, a smaller one, evaluation; from epoch 1 on what is retained of the two.
    assert graphs == [3 * regions, 5 * regions, 5 * regions, 5 * regions]
    stats = blockers[1].stats
    assert stats.steps_replayed == 6, stats.recompute_reasons
    assert not stats.recompute_reasons
    feature(GROUP, "halfway.compile, CNN" if name == "resnet" else "halfway.compile, transformer", stats)


def test_a_real_resnet_has_one_graph_per_region_and_size() -> None:
    models = pytest.importorskip("torchvision").models
    backend = Counting("eager")
    model = halfway.compile(models.resnet18(num_classes=5), at="layer1", backend=backend, fullgraph=True)
    blocker = blocked(model, "layer1", schedule=Schedule(2, unit="step"))
    for _ in range(4):
        x = torch.randn(4, 3, 32, 32)
        step(model.train(), blocker, x, torch.randint(0, 5, (4,)))
        with torch.no_grad():
            model.eval()(x)
    assert compiled_parts(model) == ["layer2", "layer3", "layer4"]
    assert backend.graphs == 3 * 3
    assert blocker.stats.steps_replayed == 2


@needs_a_limit_per_function
def test_more_sizes_than_dynamo_would_compile_by_itself() -> None:
    backend = Counting("eager")
    model = halfway.compile(ResNet(), at="layer2", backend=backend)
    for size in range(2, 14):
        step(model, None, *batch(size, size))
    assert backend.graphs == 11  # the first call is eager


@needs_a_limit_per_function
def test_regions_with_graph_breaks_do_not_share_a_limit() -> None:
    class Breaking(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            torch._dynamo.graph_break()
            return F.relu(self.norm(x))

    backend = Counting("eager")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *(Breaking(8) for _ in range(3)), nn.Flatten())
    halfway.compile(model, at="0", backend=backend)
    for size in (2, 3, 4, 5, 2, 3):
        step(model, None, *batch(size, size))
    assert backend.graphs == 3 * 4 * 2


def test_the_default_backend(feature) -> None:
    eager, model = pair(ResNet(), "layer2", backend="inductor")
    blockers = [blocked(m, "layer2") for m in (eager, model)]
    for i in range(3):
        x, y = batch(i)
        for m, blocker in zip((eager, model), blockers, strict=True):
            step(m, blocker, x, y)
        assert_same_gradients(model, eager, rtol=1e-3, atol=1e-5)
    assert blockers[1].stats.steps_replayed == 3
    feature(GROUP, "halfway.compile, inductor", blockers[1].stats)


def test_sizes_can_share_a_graph() -> None:
    backend = Counting("eager")
    model = halfway.compile(ResNet(), at="layer2", backend=backend, dynamic=True)
    for size in (8, 4, 5, 6, 7):
        step(model, None, *batch(size, size))
    assert backend.graphs == 1


@pytest.mark.parametrize("moment", ["before the first call", "after it"])
def test_the_blocker_may_be_there_first(moment: str) -> None:
    eager = ResNet()
    model = copy.deepcopy(eager)
    blockers = [blocked(m, "stem") for m in (eager, model)]
    backend = Counting()
    for i in range(5):
        if i == (0 if moment == "before the first call" else 2):
            halfway.compile(model, at="stem", backend=backend)
        x, y = batch(i)
        for m, blocker in zip((eager, model), blockers, strict=True):
            step(m, blocker, x, y)
        assert_same_gradients(model, eager)
    assert backend.graphs == 3
    assert blockers[1].stats.steps_replayed == 5


def test_bfloat16(feature) -> None:
    backend = Counting()
    eager, model = pair(ViT(), "blocks.1", backend=backend)
    blockers = [blocked(m, "blocks.1") for m in (eager, model)]
    for i in range(4):
        x, y = batch(i)
        for m, blocker in zip((eager, model), blockers, strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                x_retained, y_retained = blocker(x, y)
                m.zero_grad()
                loss = F.cross_entropy(m(x_retained), y_retained)
            loss.backward()
        assert_same_gradients(model, eager, rtol=0.1, atol=2e-3)
    assert backend.graphs == 3
    assert blockers[1].stats.steps_replayed >= 3  # autocast shows in the first call
    feature(GROUP, "halfway.compile, autocast in bfloat16", blockers[1].stats)


@pytest.mark.parametrize("around", ["regions", "all"])
def test_checkpoints(around: str) -> None:
    class Checkpointed(ResNet):
        def forward(self, x: Tensor) -> Tensor:
            if around == "all":
                return checkpoint(super().forward, x, use_reentrant=False)
            x = self.layer1(self.stem(x))
            for stage in (self.layer2, self.layer3):
                x = checkpoint(stage, x, use_reentrant=False)
            return self.fc(self.pool(x).flatten(1))

    eager, model = pair(Checkpointed(), "layer1", backend="aot_eager")
    blockers = [blocked(m, "layer1") if around == "regions" else None for m in (eager, model)]
    for i in range(3):
        for m, blocker in zip((eager, model), blockers, strict=True):
            step(m, blocker, *batch(i))
        assert_same_gradients(model, eager)
    assert compiled_parts(model) == ["layer2", "layer3"]
    assert blockers[1] is None or blockers[1].stats.steps_replayed == 3


# --------------------------------------------------------------------------------------------- what is compiled


class Winding(nn.Module):
    """Registered in another order than it runs; with a module that runs twice, one that never runs, and a container
    whose parts are called."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.unused, self.shared = Block(8), Block(8), Block(8)
        self.stages = nn.ModuleDict({"deep": Block(8), "shallow": Block(8)})
        self.looped = nn.Sequential(Block(8), Block(8))
        self.inner = nn.Sequential(nn.Sequential(Block(8), Block(8)), Block(8))
        self.stem = nn.Conv2d(3, 8, 3)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
        self.auxiliary = nn.Sequential(nn.Flatten(), nn.LazyLinear(5))
        self.auxiliary[1] = nn.Linear(288, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.shared(self.stages["shallow"](self.stem(x))))
        for block in self.looped:
            x = block(x)
        x = self.last(self.stages["deep"](self.shared(x)))
        return self.head(x) + (self.auxiliary(x) if self.training else 0.0)


def test_the_largest_modules_that_are_entered_only_after_the_cut() -> None:
    model = first_call(halfway.compile(Winding(), at="inner.0.0", backend="eager"))
    assert sorted(compiled_parts(model)) == [
        "auxiliary",
        "head",
        "inner.0.1",
        "inner.1",
        "last",
        "looped.0",
        "looped.1",
        "stages.deep",
    ]


def test_evaluation_comes_first_and_decides_nothing() -> None:
    model = halfway.compile(Winding(), at="last", backend="eager")
    for _ in range(2):
        with torch.no_grad():
            model.eval()(batch(0)[0])
    assert compiled_parts(model) == []
    first_call(model)
    assert "auxiliary" in compiled_parts(model)


def test_a_call_that_fails_decides_nothing() -> None:
    model = halfway.compile(ResNet(), at="stem", backend="eager")
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 5, 8, 8))
    assert compiled_parts(model) == []
    first_call(model)
    assert compiled_parts(model) == ["layer1", "layer2", "layer3"]
    assert not any("_call_impl" in vars(module) for module in model.modules())


def test_the_model_is_returned_and_its_state_has_the_same_names() -> None:
    model = ResNet()
    names = list(model.state_dict())
    assert halfway.compile(model, at=model.stem, backend="eager") is model
    assert list(model.state_dict()) == names
    first_call(model)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("called", [False, True])
def test_copies_are_not_compiled_and_can_be(called: bool) -> None:
    model = halfway.compile(ResNet(), at="layer1", backend="eager")
    if called:
        first_call(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert compiled_parts(first_call(twin)) == []
        first_call(halfway.compile(twin, at="layer1", backend="eager"))
        assert compiled_parts(twin) == ["layer2", "layer3"]


def test_within_another_model() -> None:
    outer = nn.Sequential(halfway.compile(ResNet(), at="layer1", backend="eager"), nn.Identity())
    blocker = blocked(outer, "0.layer1")
    for i in range(3):
        step(outer, blocker, *batch(i))
    assert compiled_parts(outer) == ["0.layer2", "0.layer3"]
    assert blocker.stats.steps_replayed == 3


# ------------------------------------------------------------------------------------------------- two processes


def train_ddp(rank: int) -> tuple[int, dict[str, int], list[str], list[Tensor]]:
    torch.manual_seed(0)
    eager, model = pair(ResNet(), "layer1", backend="aot_eager")
    ddps = [DDP(m) for m in (eager, model)]
    blockers = [blocked(ddp, "layer1") for ddp in ddps]
    for i in range(4):
        for ddp, blocker in zip(ddps, blockers, strict=True):
            step(ddp, blocker, *batch(10 * i + rank))
        assert_same_gradients(model, eager)
    with pytest.raises(ValueError, match=r"DDP wraps this model already; use halfway\.compile.* before DDP"):
        halfway.compile(DDP(ResNet()), at="stem")
    stats = blockers[1].stats
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return stats.steps_replayed, dict(stats.recompute_reasons), compiled_parts(model), gradients


def test_ddp(feature) -> None:
    found = processes.run(2, train_ddp)
    for replayed, reasons, compiled, gradients in found:
        assert (replayed, compiled) == (4, ["layer2", "layer3"]), reasons
        assert all(torch.equal(a, b) for a, b in zip(gradients, found[0][3], strict=True))
    feature(GROUP, "halfway.compile, DDP", found[0][:2])


# ---------------------------------------------------------------------------------------------- what cannot work


def refused(error: type[Exception], match: str, model: nn.Module, at: Any = "stem") -> None:
    with pytest.raises(error, match=match):
        halfway.compile(model, at=at, backend="eager")


def test_a_layer_that_does_not_exist() -> None:
    refused(ValueError, r"no module 'layer9' in this ResNet; the closest are \['layer", ResNet(), "layer9")
    refused(ValueError, "not a submodule of this ResNet", ResNet(), nn.Linear(1, 1))
    refused(TypeError, "at must be the name of a layer", ResNet(), 3)


def test_no_cut() -> None:
    refused(ValueError, r"at=None.*torch\.compile\(model\)", ResNet(), None)


def test_compiled_already() -> None:
    refused(ValueError, "compiled already", torch.compile(ResNet(), backend="eager"))
    model = ResNet()
    model.layer3.compile(backend="eager")
    refused(ValueError, "compiled already", model)
    model = halfway.compile(ResNet(), at="stem", backend="eager")
    refused(ValueError, "compiled already", model)
    refused(ValueError, "compiled already", first_call(model))


def test_in_the_middle_of_a_step() -> None:
    model = ResNet()
    blocker = blocked(model, "stem")
    retained = blocker(*batch(0))
    refused(RuntimeError, "before the training begins", model)
    del retained


@pytest.mark.parametrize("at", ["fc", "pool"])
def test_nothing_after_the_cut(at: str) -> None:
    model = halfway.compile(ResNet(), at=at, backend="eager")
    with pytest.raises(
        ValueError, match=rf"nothing .* after layer '{at}' of this ResNet; cut earlier .*torch\.compile"
    ):
        step(model, None, *batch(0))


def test_a_cut_that_is_skipped_is_waited_for() -> None:
    class Skipping(ResNet):
        skip = True

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.pool(self.layer3(self.stem(x))).flatten(1)) if self.skip else super().forward(x)

    model = halfway.compile(Skipping(), at="layer2", backend="eager")
    with pytest.warns(UserWarning, match="layer 'layer2' did not run in this call.*if it never runs, choose one that"):
        step(model, None, *batch(0))
    model.skip = False
    first_call(model)
    assert compiled_parts(model) == ["layer3"]


def test_options_that_torch_compile_does_not_know_are_refused_at_once() -> None:
    with pytest.raises(Exception, match="nonsense"):
        halfway.compile(ResNet(), at="layer2", backend="nonsense")


def test_a_batch_of_another_shape_is_replayed_at_once() -> None:
    """What is compiled lies after the cut, on this path through the model as on every other."""
    eager, model = pair(ResNet(), "stem")
    blockers = [blocked(m, "stem", reuse="replay") for m in (eager, model)]
    for i, side in enumerate((8, 8, 8, 12, 10, 12)):
        x, y = torch.randn(N, 3, side, side), batch(i)[1]
        for m, blocker in zip((eager, model), blockers, strict=True):
            step(m, blocker, x, y)
        assert_same_gradients(model, eager)
    assert compiled_parts(model) == ["layer1", "layer2", "layer3"]
    assert blockers[1].stats.steps_replayed == 6


def test_a_selector_that_looks_at_outputs_says_what_to_do(feature) -> None:
    model = halfway.compile(ResNet(), at="layer2", backend="eager")
    with pytest.warns(UserWarning, match=r"'loss' looks at the model's output.*use torch\.compile\(model\) instead"):
        blocker = ForwardBlocker(model, None, 0.5, selector="loss")
    for i in range(3):
        step(model, blocker, *batch(i))
    assert blocker.stats.steps_replayed == 3
    with torch.no_grad():
        model.eval()(batch(0)[0])
    assert compiled_parts(model) == ["layer3"]
    with pytest.warns(UserWarning, match="all of it runs before its output .compile all or nothing"):
        step(model.train(), blocker, *batch(3))
    assert blocker.stats.steps_recomputed == 1
    feature(GROUP, "halfway.compile, a selector that looks at outputs", blocker.stats)


def test_a_selector_that_watches_a_layer_says_that_it_is_compiled() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 5)))
    halfway.compile(model, at="1", backend="eager")
    blocker = ForwardBlocker(model, None, 0.5, selector="balanced_remembered")
    ids = torch.arange(N)
    x, y = batch(0)
    for _ in range(2):
        F.cross_entropy(model(blocker(x, ids=ids)), y[: N // 2]).backward()
    with pytest.raises(TypeError, match="'balanced_remembered' watches a layer, which a compiled model does not show"):
        blocker(x, ids=ids)
    assert blocker.stats.steps == 2
