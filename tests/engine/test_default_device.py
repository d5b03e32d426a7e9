"""A default device or dtype around the training changes nothing: what halfway makes lies where it says."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfway
from halfway.integrations._fields import Fields
from halfway.samplers import SAMPLERS, WithWeights
from halfway.selectors import SELECTORS
from halfway.state.sample_memory import SampleMemory

N, BATCH = 24, 8


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    before = torch.get_default_device()
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None if before.type == "cpu" else before)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


OTHERS: dict[str, Callable[[], Any]] = {
    "torch.device": lambda: torch.device("meta"),
    "set_default_device": lambda: default_device("meta"),
}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, Tensor):
        return a.device == b.device and a.dtype == b.dtype and torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))
    return a == b


def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator("cpu").manual_seed(1)
    x = torch.randn(N, 6, generator=generator, device="cpu", dtype=torch.float32)
    ids = torch.arange(N, device="cpu")
    return [(x[i : i + BATCH], ids[i : i + BATCH] % 3, ids[i : i + BATCH]) for i in range(0, N, BATCH)] * 2


def made(name: str) -> halfway.Selector:
    if name.startswith("rho"):
        return SELECTORS[name](losses=torch.linspace(0, 1, N, device="cpu", dtype=torch.float32))
    if name == "proxy":
        return SELECTORS[name](model=nn.Linear(6, 3, device="cpu", dtype=torch.float32))
    settings: dict[str, Any] = {
        "density": {"num_centroids": 6},
        "density_public": {"num_centroids": 6},
        "balanced_remembered": {"dim": 4, "num_samples": N},
        "balanced_proportional": {"dim": 4, "num_samples": N},
    }.get(name, {})
    return SELECTORS[name](**settings)


def trained(selector: Callable[[], halfway.Selector], around: Callable[[], Any]) -> Any:
    """Everything a training with this selector leads to, where `around` lies around all that halfway does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = []
    with around():
        blocker = halfway.ForwardBlocker(model, "1", 0.5, selector=selector())
        for epoch in range(2):
            blocker.set_epoch(epoch)
            for x, y, ids in batches():
                x, y = blocker(x, y, ids=ids)
                losses = F.cross_entropy(model(x), y, reduction="none")
                blocker.observe(losses)
                losses.mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                assert blocker.last is not None
                rows.append(blocker.last.indices)
        state = blocker.state_dict()
        blocker.remove()
        again = halfway.ForwardBlocker(model, "1", 0.5, selector=selector())
        empty = again.state_dict()
        again.load_state_dict(state)
        x, y, ids = batches()[0]
        model(again(x, y, ids=ids)[0])
        rows.append(again.last.indices if again.last is not None else None)
        assert all(t.device.type == "cpu" for t in empty["selector"].values() if isinstance(t, Tensor))
    return rows, state, model.state_dict()


@pytest.mark.parametrize("around", OTHERS)
@pytest.mark.parametrize("name", SELECTORS)
def test_every_selector_trains_as_without_a_default_device(name: str, around: str) -> None:
    def selector() -> halfway.Selector:
        return made(name)

    assert equal(trained(selector, OTHERS[around]), trained(selector, contextlib.nullcontext))


def sampled(name: str, around: Callable[[], Any]) -> Any:
    options: dict[str, Any] = {"dyn_unc": {"window": 2}, "ucb": {"period": 1}, "epsilon_greedy": {"period": 1}}.get(
        name, {}
    )
    cls, found = SAMPLERS[name], []
    data = WithWeights(TensorDataset(torch.arange(N, device="cpu") / N))
    with around():
        sampler = cls(data, 0.5, schedule=halfway.Schedule(1), seed=2, **options)
        for epoch in range(4):
            sampler.set_epoch(epoch)
            for index in sampler:
                (x, ids, weight) = data[index]
                found.append((ids, weight))
                sampler.observe(torch.tensor([ids], device="cpu"), 1 + x.reshape(1).float())
            found.append(sampler.retained)
            found.append(sampler.weights(torch.arange(N, device="cpu")))
        state = sampler.state_dict()
        again = cls(data, 0.5, schedule=halfway.Schedule(1), seed=2, **options)
        again.load_state_dict(state)
        again.set_epoch(4, skip=2)
        found.append(list(again))
    return found, state


@pytest.mark.parametrize("around", OTHERS)
@pytest.mark.parametrize("name", [*SAMPLERS, "rs2 without replacement", "infobatch, match", "infobatch, quantile"])
def test_every_sampler_decides_as_without_a_default_device(name: str, around: str, monkeypatch: Any) -> None:
    variants: dict[str, Any] = {
        "rs2 without replacement": ("rs2", {"replacement": False}),
        "infobatch, match": ("infobatch", {"threshold": "match"}),
        "infobatch, quantile": ("infobatch", {"threshold": 0.5}),
    }
    base, settings = variants.get(name, (name, {}))
    cls = SAMPLERS[base]
    monkeypatch.setitem(SAMPLERS, base, lambda *args, **options: cls(*args, **{**settings, **options}))
    assert equal(sampled(base, OTHERS[around]), sampled(base, contextlib.nullcontext))


@pytest.mark.parametrize("around", OTHERS)
def test_the_estimator_and_the_memory_are_where_the_samples_are(around: str) -> None:
    x = torch.randn(20, 5)
    with OTHERS[around]():
        estimator = halfway.DensityEstimator(4, 5)
        estimator.update(x)
        assert estimator.log_density(x).device.type == "cpu"
        memory = SampleMemory(2)
        memory.write(torch.arange(5, device="cpu"), x[:5, :2])
        assert torch.equal(memory.read(torch.arange(5, device="cpu")), x[:5, :2])


@pytest.mark.parametrize("around", OTHERS)
def test_a_file_of_losses_is_read_to_the_host(around: str, tmp_path: Any) -> None:
    torch.save({"losses": torch.rand(N)}, tmp_path / "losses.pt")
    with OTHERS[around]():
        selector = halfway.selectors.Rho(tmp_path / "losses.pt")
    assert selector._irreducible.values.device.type == "cpu"


@pytest.mark.parametrize("around", OTHERS)
def test_a_trainers_batch_with_ids_in_a_list(around: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    blocker = halfway.ForwardBlocker(model, None, 0.5, selector="rotate")
    x, y = torch.randn(4, 6), torch.arange(4)
    for ids in ([3, 1, 0, 2], torch.tensor([3, 1, 0, 2])):
        with OTHERS[around]():
            batch = Fields("number").retain(blocker, {"input": x, "y": y, "number": ids})
        assert blocker.last is not None
        assert batch["number"].tolist() == [[3, 1, 0, 2][i] for i in blocker.last.indices]


@pytest.mark.parametrize("name", SELECTORS)
def test_every_selector_trains_with_double_as_the_default_dtype(name: str) -> None:
    """Single precision data in a program that works in double elsewhere: the choice is the same."""
    rows, state, _ = trained(lambda: made(name), lambda: default_dtype(torch.float64))
    assert len(rows) == 13
    file = io.BytesIO()
    torch.save(state, file)


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_decides_alike_with_double_as_the_default_dtype(name: str) -> None:
    found, state = sampled(name, lambda: default_dtype(torch.float64))
    expected, expected_state = sampled(name, contextlib.nullcontext)
    assert equal(found, expected)
    assert equal(state, expected_state)


def test_workers_hand_on_weights_on_the_host() -> None:
    sampler = SAMPLERS["infobatch"](N, 0.5)
    sampler.set_epoch(0)
    data = WithWeights(TensorDataset(torch.arange(N)))
    with torch.device("meta"):
        item = data[next(iter(sampler))]
    assert item[-1].device.type == "cpu"
    assert len(next(iter(DataLoader(data, 4, sampler=sampler)))) == 3
