"""Accelerate: what is trained with a prepared model is what a loop of one's own would train."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfway
from halfway import Density, ForwardBlocker
from halfway.selectors import Balanced
from tests.helpers import processes
from tests.helpers.compiled import compiled_parts
from tests.helpers.launched import run

pytest.importorskip("accelerate")

from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, set_seed

from halfway.integrations.accelerate import block, refuse_unsupported

GROUP = "Accelerate"
X = torch.randn(128, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randint(5, (128,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _anew() -> Any:
    """Accelerate keeps its settings for the whole process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout(dropout))
        self.deep = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))
        self.deep(self.stem(X[:1]))

    def forward(self, image: Tensor) -> Tensor:
        return self.deep(self.stem(image))


def prepared(
    dropout: float = 0.0, batch: int = 16, data: Any = None, shuffle: bool = False, **settings: Any
) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(cpu=True, **settings)
    model = Net(dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data or TensorDataset(X, Y), batch_size=batch, shuffle=shuffle)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def train(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, blocker: ForwardBlocker) -> list[Any]:
    """An epoch. Returns the retained rows of each step."""
    rows = []
    for x, y in loader:
        with accelerator.accumulate(model):
            x, y = blocker(x, y)
            rows.append(blocker.last.indices.tolist())
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return rows


def by_hand(accumulate: int = 1, steps: int = 8) -> tuple[nn.Module, list[Any]]:
    model = Net()
    blocker = ForwardBlocker(model, "stem", 0.5, reuse="replay")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = []
    for i in range(steps):
        x, y = blocker(X[16 * i : 16 * (i + 1)], Y[16 * i : 16 * (i + 1)])
        rows.append(blocker.last.indices.tolist())
        (F.cross_entropy(model(x), y) / accumulate).backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model, rows


def assert_same(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, msg=name, **(tolerance or {"rtol": 0.0, "atol": 0.0}))


def test_a_model_compiled_after_the_cut_is_replayed(feature) -> None:
    accelerator = Accelerator(cpu=True)
    model = halfway.compile(Net(), at="stem", backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(X, Y), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    blocker = block(accelerator, model, at="stem", prune_ratio=0.5, reuse="replay")
    rows = train(accelerator, model, optimizer, loader, blocker)
    expected, expected_rows = by_hand()
    assert rows == expected_rows
    assert_same(accelerator.unwrap_model(model), expected, rtol=1e-4, atol=1e-6)
    assert compiled_parts(accelerator.unwrap_model(model)) == ["deep"]
    feature(GROUP, "halfway.compile", blocker.stats)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_trains_as_the_usual_loop_would(accumulate: int, feature) -> None:
    accelerator, model, optimizer, loader = prepared(gradient_accumulation_steps=accumulate)
    blocker = block(accelerator, model, at="stem", prune_ratio=0.5, reuse="replay")
    rows = train(accelerator, model, optimizer, loader, blocker)
    expected, expected_rows = by_hand(accumulate)
    assert rows == expected_rows
    assert_same(accelerator.unwrap_model(model), expected)
    stats = blocker.stats
    assert (stats.steps_replayed, stats.steps_recomputed) == (8, 0)
    feature(GROUP, "accumulate" if accumulate > 1 else "prepare, one process", stats)


def test_a_plain_blocker_will_do(feature) -> None:
    accelerator, model, optimizer, loader = prepared()
    blocker = ForwardBlocker(model, "stem", 0.5)
    train(accelerator, model, optimizer, loader, blocker)
    assert_same(accelerator.unwrap_model(model), by_hand()[0])
    feature(GROUP, "ForwardBlocker, not registered for checkpoints", blocker.stats)


@pytest.mark.parametrize("at", ["stem", "the output"])
def test_it_replays_in_bfloat16(at: str, feature) -> None:
    """Accelerate wraps `model.forward` in autocast, and turns the outputs into float32: all of it within the call."""
    accelerator, model, optimizer, loader = prepared(mixed_precision="bf16")
    selector = Density() if at == "stem" else "loss"
    blocker = block(accelerator, model, at if at == "stem" else None, 0.5, selector=selector, reuse="replay")
    gradients = []
    for x, y in loader:
        x, y = blocker(x, y)
        outputs = model(x)
        assert outputs.dtype == torch.float32
        accelerator.backward(F.cross_entropy(outputs, y))
        replayed = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))  # not blocked: computed
        gradients.append((replayed, [p.grad.clone() for p in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    for replayed, computed in gradients:
        for a, b in zip(replayed, computed, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=1e-4)
    stats = blocker.stats
    assert (stats.steps_replayed, stats.steps_recomputed) == (8, 0)
    if at == "stem":
        feature(GROUP, 'mixed_precision="bf16"', stats)


def epochs(folder: Path, selector: str, dropout: float, *, begin: int = 0, stop: int = 12) -> tuple[nn.Module, Any]:
    """Three epochs of 4 steps, from a checkpoint at step `begin` on, up to step `stop`, where one is saved."""
    set_seed(3)
    sampling = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator, model, optimizer, loader = prepared(dropout, batch=32, shuffle=True, dataloader_config=sampling)
    blocker = block(accelerator, model, "stem", 0.5, selector=selector)
    if begin:
        for parameter in model.parameters():
            parameter.data.zero_()
        accelerator.load_state(str(folder))
    step = begin
    for epoch in range(begin // 4, 3):
        loader.set_epoch(epoch)
        left = skip_first_batches(loader, begin % 4) if epoch == begin // 4 else loader
        for x, y in left:
            x, y = blocker(x, y, ids=torch.arange(len(x)))
            losses = F.cross_entropy(model(x), y, reduction="none")
            blocker.observe(losses)
            accelerator.backward(losses.mean())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == stop:
                accelerator.save_state(str(folder))
                return model, blocker.stats
    raise AssertionError("unreachable")


# A loader that begins in the middle of an epoch has drawn from torch's generator once more: then without dropout.
@pytest.mark.parametrize(("at", "dropout"), [(4, 0.3), (6, 0.0)])
@pytest.mark.parametrize("selector", ["density", "last_loss", "balanced"])
def test_saved_and_loaded_is_bit_identical(selector: str, at: int, dropout: float, tmp_path: Path, feature) -> None:
    unbroken, stats = epochs(tmp_path / "unbroken", selector, dropout)
    epochs(tmp_path / "stopped", selector, dropout, stop=at)
    resumed, resumed_stats = epochs(tmp_path / "stopped", selector, dropout, begin=at)
    assert_same(resumed, unbroken)
    assert resumed_stats == stats
    assert stats.steps == 12
    if selector == "density":
        feature(GROUP, "save_state, load_state", stats)


def test_without_its_state_it_would_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    unbroken, _ = epochs(tmp_path / "unbroken", "density", 0.0)
    epochs(tmp_path / "stopped", "density", 0.0, stop=6)
    monkeypatch.setattr(ForwardBlocker, "load_state_dict", lambda self, state: None)
    resumed, _ = epochs(tmp_path / "stopped", "density", 0.0, begin=6)
    with pytest.raises(AssertionError, match="stem"):
        assert_same(resumed, unbroken)


def test_ids_and_losses(feature) -> None:
    accelerator, model, optimizer, loader = prepared(data=halfway.WithIds(TensorDataset(X, Y)))
    blocker = block(accelerator, model, "stem", 0.5, selector=Balanced())
    known: dict[int, float] = {}
    for x, y, ids in loader:
        x, y = blocker(x, y, ids=ids)
        losses = F.cross_entropy(model(x), y, reduction="none")
        blocker.observe(losses)
        known.update(zip(ids[blocker.last.indices].tolist(), losses.tolist(), strict=True))
        accelerator.backward(losses.mean())
        optimizer.step()
        optimizer.zero_grad()
    memory = blocker.selector._losses.values.squeeze(1)
    assert {i: memory[i].item() for i in known} == pytest.approx(known)
    assert len(known) == 64
    feature(GROUP, "ids, and losses fed back", blocker.stats)


# -------------------------------------------------------------- several processes


def rank_of_a_job(rank: int) -> Any:
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    os.environ.update({name: str(value) for name, value in where.items()})
    accelerator, model, optimizer, loader = prepared(batch=8, gradient_accumulation_steps=2)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    blocker = block(accelerator, model, "stem", 0.5)
    retained = []
    for x, y in loader:
        with accelerator.accumulate(model):
            x, y = blocker(x, y)
            retained.append((x, y))
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    stats = blocker.stats
    return retained, accelerator.unwrap_model(model).state_dict(), (stats.steps_replayed, stats.recompute_reasons)


def test_two_processes_train_what_one_would_with_all_their_retained_samples(feature) -> None:
    results = processes.run(2, rank_of_a_job)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for i, parts in enumerate(zip(*(retained for retained, _, _ in results), strict=True)):
        x, y = (torch.cat(together) for together in zip(*parts, strict=True))
        assert len(x) == 8
        (F.cross_entropy(model(x), y) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    for _, weights, outcome in results:
        assert outcome == (8, {})
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)
    feature(GROUP, "DDP, 2 processes, accumulate", results[0][2])


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_example_runs(ranks: int) -> None:
    pytest.importorskip("sklearn")
    more = ["--mixed-precision", "bf16"] if ranks == 1 else []
    out = run("examples/accelerate_loop.py", "--steps", "4", *more, processes=ranks)
    for words in ("effective_ratio=0.40", "steps_replayed=4", "steps_recomputed=0"):
        assert words in out


# ----------------------------------------------------------------------- refused


def stand_in(kind: str, fsdp2: bool = False, shared: int = 1) -> Any:
    parallelism = SimpleNamespace(non_data_parallel_size=shared)
    return SimpleNamespace(distributed_type=SimpleNamespace(value=kind), is_fsdp2=fsdp2, parallelism_config=parallelism)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"])
def test_what_was_not_tested_is_refused(kind: str, feature) -> None:
    with pytest.raises(TypeError, match=rf"halfway does not work with {kind}1?; use DDP.*torchrun") as error:
        block(stand_in(kind), Net(), "stem", 0.5)
    if kind in ("DEEPSPEED", "FSDP"):
        feature(GROUP, {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP1"}[kind] + " (a stand-in)", error.value)


def test_processes_that_share_a_batch_are_refused() -> None:
    with pytest.raises(TypeError, match=r"4 processes share each batch.*DDP"):
        block(stand_in("MULTI_GPU", shared=4), Net(), "stem", 0.5)


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "FSDP"])
def test_the_rest_is_not(kind: str) -> None:
    refuse_unsupported(stand_in(kind, fsdp2=True), Net())
