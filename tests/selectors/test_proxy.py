"""`proxy`: what it marks, how the small model learns, on one and on several ranks, and what that costs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import halfway
from halfway.selectors import Proxy
from tests.helpers import processes

B, CLASSES = 12, 3


def batches(count: int, rank: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5 + rank)
    return [
        (torch.randn(B, 6, generator=generator), torch.randint(CLASSES, (B,), generator=generator))
        for _ in range(count)
    ]


def small(norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5) if norm else nn.Tanh(), nn.Linear(5, CLASSES))


def large() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, CLASSES))


def blocked(selector: Proxy, batches: list[tuple[Tensor, Tensor]], **options: Any) -> tuple[list[Tensor], Any]:
    """The retained rows of each step, and the blocker."""
    blocker = halfway.ForwardBlocker(large(), None, 0.5, selector=selector, **options)
    rows = []
    for x, y in batches:
        blocker(x, y)
        rows.append(blocker.last.indices if blocker.last is not None else torch.arange(B))
    return rows, blocker


def reference(model: nn.Module, data: list[tuple[Tensor, Tensor]], every: int, lr: float = 0.05) -> list[Tensor]:
    """The same by a plain loop in float64, with torch's own SGD."""
    model = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=0.01)
    rows = []
    for k, (x, y) in enumerate(data):
        losses = F.cross_entropy(model(x.double()), y, reduction="none")
        rows.append(losses.topk(B // 2).indices.sort().values)
        if k % every == 0:
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows[-1]].double()), y[rows[-1]]).backward()
            optimizer.step()
    return rows, model


@pytest.mark.parametrize("every", [1, 4])
def test_it_marks_the_hardest_and_learns_from_those_of_every_so_many_batches(every: int) -> None:
    data = batches(20)
    rows, blocker = blocked(Proxy(small(), weight_decay=0.01, every=every), data)
    expected, model = reference(small(), data, every)
    for found, wanted in zip(rows, expected, strict=True):
        assert torch.equal(found, wanted)
    for a, b in zip(blocker.selector.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)


def test_scoring_does_not_move_the_proxys_statistics() -> None:
    data = batches(3)
    proxy = small(norm=True)
    blocked(Proxy(proxy, every=100), data)
    alone = small(norm=True)
    rows = F.cross_entropy(alone(data[0][0]), data[0][1], reduction="none").topk(B // 2).indices.sort().values
    alone = small(norm=True)
    alone(data[0][0][rows])  # the one batch it was trained on
    torch.testing.assert_close(proxy[1].running_mean, alone[1].running_mean)


def test_its_price_is_part_of_the_cost() -> None:
    steps = 8

    def flops(model: nn.Module, samples: int, training: bool) -> float:
        with FlopCounterMode(display=False) as counter:
            out = model(torch.randn(samples, 6))
            if training:
                out.sum().backward()
        return counter.get_total_flops()

    _rows, blocker = blocked(Proxy(small(), every=4), batches(steps))
    proxy = steps * flops(small(), B, False) + steps / 4 * flops(small(), B // 2, True)
    full = steps * flops(large(), B, True)
    assert blocker.stats.relative_flops == pytest.approx(0.5 + proxy / full, rel=1e-6)


def test_in_epochs_that_prune_nothing_it_learns_from_all_samples() -> None:
    proxy = small()
    rows, blocker = blocked(Proxy(proxy, every=1), batches(1), schedule=halfway.Schedule(5, unit="step"))
    assert len(rows[0]) == B
    x, y = batches(1)[0]
    alone = small()
    optimizer = torch.optim.SGD(alone.parameters(), 0.05)
    F.cross_entropy(alone(x), y).backward()
    optimizer.step()
    for a, b in zip(proxy.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert blocker.stats.relative_flops > 1


def test_stopped_and_resumed_it_goes_on_with_the_same_bits() -> None:
    data = batches(12)
    whole, _ = blocked(Proxy(small(norm=True)), data)
    first, blocker = blocked(Proxy(small(norm=True)), data[:5])
    state = copy.deepcopy(blocker.state_dict())
    resumed = halfway.ForwardBlocker(large(), None, 0.5, selector=Proxy(small(norm=True)))
    resumed.load_state_dict(state)
    for (x, y), expected in zip(data[5:], whole[5:], strict=True):
        resumed(x, y)
        assert torch.equal(resumed.last.indices, expected)
    assert [r.tolist() for r in first] == [r.tolist() for r in whole[:5]]


def _on_two_ranks(rank: int) -> Any:
    rows, blocker = blocked(Proxy(small(), every=2), batches(8, rank))
    return rows, blocker.state_dict()["selector"]["model"]


def test_two_ranks_train_one_proxy_with_the_samples_of_both() -> None:
    (rows_0, state_0), (rows_1, state_1) = processes.run(2, _on_two_ranks)
    for name, value in state_0.items():
        assert torch.equal(value, state_1[name]), name
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for k, ((x0, y0), (x1, y1)) in enumerate(zip(batches(8, 0), batches(8, 1), strict=True)):
        if k % 2 == 0:
            x = torch.cat([x0[rows_0[k]], x1[rows_1[k]]])
            y = torch.cat([y0[rows_0[k]], y1[rows_1[k]]])
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state_0[name], value)


def test_a_batch_that_is_not_finite_teaches_it_nothing_and_is_reported() -> None:
    proxy = small()
    before = copy.deepcopy(proxy.state_dict())
    x, y = batches(1)[0]
    x[3] = float("nan")
    _rows, blocker = blocked(Proxy(proxy, every=1), [(x, y)])
    for name, value in proxy.state_dict().items():
        assert torch.equal(value, before[name])
    with pytest.raises(FloatingPointError, match="not finite"):
        blocker.set_epoch(1)


def test_the_models_own_gradients_and_mode_are_left_alone() -> None:
    proxy = small().eval()
    model = large()
    blocker = halfway.ForwardBlocker(model, None, 0.5, selector=Proxy(proxy))
    for x, y in batches(2):
        blocker(x, y)
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is None for p in proxy.parameters())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, TypeError, r"Proxy\(model=\.\.\.\)"),
        ({"model": small(), "every": 0}, ValueError, "every"),
        ({"model": small(), "lr": 0.0}, ValueError, "lr > 0"),
    ],
)
def test_bad_settings_are_an_error(options, error, message) -> None:
    with pytest.raises(error, match=message):
        Proxy(**options)


def test_before_loading_there_is_nothing_to_mark() -> None:
    with pytest.raises(ValueError, match=r"looks at the inputs.*halfway\.ForwardBlocker"):
        halfway.PrunedBatchSampler(range(10), 5, 0.5, selector=Proxy(small()))
