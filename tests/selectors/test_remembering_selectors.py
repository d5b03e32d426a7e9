"""What the selectors that remember something of each sample share: state, ids, training, ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from halfway import ForwardBlocker, Schedule
from halfway.selectors import (
    Auto,
    BalancedProportional,
    Candidates,
    Density,
    DensityPublic,
    LastLoss,
    LastLossHard,
    LastLossProportional,
    OrderDP,
    RhoRemembered,
    Rotate,
)
from halfway.state import sample_memory as memories
from halfway.state.ranks import Ranks
from tests.helpers import processes
from tests.helpers.draws import generator, randn
from tests.helpers.remembered import Net, candidates, teach, through_a_file
from tests.helpers.waiting import NoWaiting


@pytest.mark.parametrize("num_samples", [None, 12])
@pytest.mark.parametrize("make", [Rotate, LastLoss, LastLossHard, LastLossProportional, OrderDP])
def test_the_state_travels(make, num_samples):
    first, second = make(num_samples=num_samples), make(num_samples=num_samples)
    shapes = {k: v.shape for k, v in first.state_dict().items()}
    ids = torch.arange(12)
    teach(first, candidates(ids), torch.arange(0, 12, 2), torch.rand(6, generator=generator(1)))
    state = through_a_file(first.state_dict())
    if num_samples:
        assert shapes == {k: v.shape for k, v in state.items()}
    second.load_state_dict(state)
    a, b = (selector.select(candidates(ids), 5) for selector in (first, second))
    assert torch.equal(a.indices, b.indices)
    assert torch.equal(a.importance, b.importance)
    assert first.config() == second.config()
    assert first.config()["num_samples"] == num_samples
    assert LastLoss().config() != LastLoss(temperature=2.0).config()


@pytest.mark.parametrize("make", [Rotate, LastLoss, LastLossHard, LastLossProportional, OrderDP])
def test_a_state_that_does_not_fit_is_refused(make):
    selector = make(num_samples=4)
    key = next(iter(selector.state_dict()))
    for state in ({}, {"other": torch.zeros(4, 1)}, {key: torch.zeros(4)}, {key: torch.zeros(4, 2)}):
        with pytest.raises(ValueError, match="state"):
            selector.load_state_dict(state)
    with pytest.raises(ValueError, match="remembers 5 samples, here are 4"):
        selector.load_state_dict({key: torch.zeros(5, 1)})


@pytest.mark.parametrize("make", [Rotate, LastLoss, LastLossHard, LastLossProportional, OrderDP])
def test_an_id_out_of_range_is_named_at_once(make):
    with pytest.raises(ValueError, match="the id 4"):
        make(num_samples=4).select(candidates(torch.tensor([0, 4])), 1)


@pytest.mark.parametrize("make", [Rotate, LastLoss, LastLossHard, LastLossProportional, OrderDP])
def test_an_id_out_of_range_on_the_device_is_reported_by_check(make, monkeypatch):
    monkeypatch.setattr(memories, "_on_host", lambda ids: False)
    selector = make(num_samples=4)
    assert len(selector.select(candidates(torch.tensor([0, 4, 1])), 2).indices) == 2
    with pytest.raises(ValueError, match="out of range"):
        selector.check()
    selector.check()


@pytest.mark.parametrize(
    "selector",
    [
        Rotate(30),
        LastLoss(num_samples=30),
        LastLossHard(30),
        LastLossProportional(cap="chance", num_classes=3, num_samples=30),
        OrderDP(num_samples=30),
        Auto(num_samples=30),
        BalancedProportional(num_samples=30),
        RhoRemembered(torch.rand(30)),
        RhoRemembered(torch.rand(30), temperature=1.0),
        Density(8),
        DensityPublic(8),
    ],
)
def test_no_step_waits_for_the_device(selector, monkeypatch):
    monkeypatch.setattr(memories, "_on_host", lambda ids: False)
    source, ids, features, losses = generator(0), torch.arange(20), randn(20, 6), torch.rand(20)
    selector.learn(candidates(ids, source, features=features), None)  # centroids are filled once, and read then
    with NoWaiting():
        for _ in range(3):
            batch = candidates(ids, source, features=features, targets=ids % 3)
            rows = selector.select(batch, 9).indices
            teach(selector, batch, rows, losses[rows])
        with pytest.raises(AssertionError, match="waits"):
            losses[0].item()
    selector.check()


@pytest.mark.parametrize("name", ["rotate", "last_loss", "density_public"])
def test_they_work_in_a_training_loop_by_name(name):
    torch.manual_seed(0)
    net, ids = Net(), torch.arange(16)
    x, y = torch.randn(16, 5), torch.arange(16) % 4
    at = "body" if name == "density_public" else None
    blocker = ForwardBlocker(net, at, 0.5, selector=name, schedule=Schedule(1, unit="step"))
    seen = set()
    for step in range(3):
        part, part_y, rows = blocker(x, y, torch.arange(16), ids=ids)
        losses = F.cross_entropy(net(part), part_y, reduction="none")
        blocker.observe(losses)
        losses.mean().backward()
        assert len(part) == (8 if step else 16)
        if name == "last_loss":
            remembered = blocker.selector.state_dict()["losses"][rows].squeeze(1)
            torch.testing.assert_close(remembered, losses.detach())
        if name == "rotate" and step:
            assert not seen & set(rows.tolist())
            seen |= set(rows.tolist())
    assert blocker.stats.steps == 3


# ------------------------------------------------------------------------------------------------- several ranks


def remember(rank, name, steps):
    """Ranks with batches of different sizes, and different numbers of them, share what they remember."""
    ranks, selector = Ranks(), Rotate() if name == "rotate" else LastLossHard()
    told = []
    for step in range(4):
        if step >= steps[rank]:
            ranks.send_nothing()
            continue
        size = 6 - rank
        ids = (torch.arange(size) + 6 * rank) if step != 2 else (torch.arange(size) + 6 - 6 * rank)  # they swap
        batch = Candidates(size, generator(10 * step + rank), ids=ids, ranks=ranks)
        rows = selector.select(batch, 3).indices
        losses = torch.rand(3, generator=generator(100 * step + rank))
        teach(selector, batch, rows, losses)
        told.append((step, rank, ids.tolist(), rows.tolist(), losses.tolist()))
    selector.check()
    return selector.state_dict(), told


@pytest.mark.parametrize("name", ["rotate", "last_loss"])
def test_ranks_remember_the_same_bits(name):
    (first, told), (second, also_told) = processes.run(2, remember, name, (4, 3))
    key = "waited" if name == "rotate" else "losses"
    assert torch.equal(first[key].view(torch.int32), second[key].view(torch.int32))
    expected = {}
    for _, _, ids, rows, losses in sorted(told + also_told):
        for row, id in enumerate(ids):
            if name == "rotate":
                expected[id] = 0.0 if row in rows else expected.get(id, 0.0) + 1
            elif row in rows:
                expected[id] = losses[rows.index(row)]
    found = first[key].squeeze(1)
    for id, value in expected.items():
        assert found[id] == pytest.approx(value, rel=1e-6)
    if name == "last_loss":
        assert found.isfinite().sum() == len(expected)
