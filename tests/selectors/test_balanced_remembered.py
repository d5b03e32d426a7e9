"""Balanced sampling by what was noted of the samples when they were last trained on, alone and on several ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfway import ForwardBlocker
from halfway.selectors import Balanced, BalancedRemembered, Candidates
from halfway.selectors.balanced_remembered import projection
from halfway.selectors.tools.channels import find_input_channel_dim
from halfway.selectors.tools.pivotal import distances, pivotal, standardised
from halfway.state.ranks import Ranks
from tests.helpers import processes
from tests.helpers.balanced import Net, assert_equally_likely, between, candidates, drawn
from tests.helpers.draws import generator, randn


def test_what_was_noted_of_a_sample_decides_next_time():
    size, ids = 16, torch.randperm(100, generator=generator(1))[:16]
    x = randn(size // 2, 5).repeat(2, 1)
    selector, source = BalancedRemembered(), generator(0)
    assert (selector.needs, selector.wants_ids) == ("nothing", "required")
    selector.watches(Net())

    def together(order):
        rows = [order[selector.select(candidates(None, source, size, ids=ids[order]), 8).indices] for _ in range(30)]
        chosen = torch.stack([torch.zeros(size).index_fill(0, r, 1) for r in rows])
        return (chosen[:, :8] + chosen[:, 8:] != 1).double().mean()

    assert together(torch.arange(size)) > 0.3  # nothing is known: random
    retained = torch.arange(0, size, 3)
    selector.note(candidates(size=size, ids=ids), retained, x[retained])
    assert together(torch.arange(size)) > 0.2
    selector.note(candidates(size=size, ids=ids), None, x)
    assert together(torch.arange(size)) == 0
    assert together(torch.randperm(size, generator=source)) == 0  # by id, not by place
    selector.note(candidates(size=2, ids=ids[:2]), None, 100 + x[:2])  # the last known ones count
    assert together(torch.arange(size)) > 0
    assert (selector.state_dict()["features"][ids[:2], :5] > 50).all()


def test_samples_of_which_nothing_is_remembered_are_average():
    size, selector, source = 12, BalancedRemembered(dim=3), generator(0)
    selector.note(candidates(size=6, ids=torch.arange(6)), None, randn(6, 3) + 50)
    x = standardised(selector.state_dict()["features"], torch.ones(6, dtype=torch.bool))
    d = distances(torch.cat([x, torch.zeros(6, 3)]))
    for seed in range(5):
        found = selector.select(candidates(None, seed, size, ids=torch.arange(size)), 5).indices
        assert torch.equal(found, pivotal(d, 5, generator(seed)))
    chosen = drawn(
        lambda: selector.select(candidates(None, source, size, ids=torch.arange(size)), 5).indices, size, 600
    )
    assert_equally_likely(chosen, 5 / size)


@pytest.mark.parametrize("width", [64, 65, 512])
def test_the_projection_keeps_neighbours(width):
    x = randn(40, width).repeat(2, 1) + 0.1 * randn(80, width, seed=1)
    selector = BalancedRemembered(num_samples=80)
    selector.note(candidates(size=80, ids=torch.arange(80)), None, x)
    found = selector.state_dict()["features"]
    assert found.shape == (80, 64)
    if width == 64:
        assert torch.equal(found, x)
    ratio = between(found) / between(x).fill_diagonal_(1)
    ratio = ratio[~torch.eye(80, dtype=torch.bool)]
    assert abs(ratio.mean() - 1) < 0.05
    assert ratio.std() < 1.5 / math.sqrt(2 * 64)
    nearest = between(found).fill_diagonal_(math.inf).argmin(1)
    assert torch.equal(nearest, (torch.arange(80) + 40) % 80)
    assert torch.equal(projection(width, 8), projection(width, 8))


def test_positions_are_averaged_where_the_layer_says():
    assert find_input_channel_dim(nn.Linear(5, 2), torch.Size((2, 9, 5))) == -1
    assert find_input_channel_dim(nn.Conv2d(5, 2, 1), torch.Size((2, 5, 9, 9))) == 1
    assert find_input_channel_dim(nn.Conv1d(5, 2, 1), torch.Size((2, 5, 9))) == 1
    assert find_input_channel_dim(nn.Sequential(nn.ReLU(), nn.LayerNorm(5)), torch.Size((2, 9, 9, 5))) == -1
    assert find_input_channel_dim(nn.BatchNorm2d(5), torch.Size((2, 5, 9, 9))) == 1
    assert find_input_channel_dim(nn.TransformerEncoderLayer(6, 2, 7), torch.Size((2, 9, 6))) == -1
    assert find_input_channel_dim(None, torch.Size((2, 9, 6))) == -1
    x = randn(6, 5, 3, 3)
    for settings, layer, watched in (
        ({}, nn.Conv2d(5, 2, 1), x),
        ({}, nn.Linear(5, 2), x.permute(0, 2, 3, 1).bfloat16().float()),
        ({"channel_dim": -1}, nn.Identity(), x.permute(0, 2, 3, 1)),
    ):
        selector = BalancedRemembered(module="0", **settings)
        selector.watches(nn.Sequential(layer))
        selector.note(candidates(size=6, ids=torch.arange(6)), None, watched)
        found = selector.state_dict()
        torch.testing.assert_close(found["features"][:, :5], x.mean((2, 3)), atol=3e-3, rtol=0)
        assert found["width"] == 5
        assert (found["features"][:, 5:] == 0).all()


def test_the_watched_layer_is_found_by_name_or_is_the_last_linear_one():
    net = Net()
    assert Balanced().watches(net) is None
    assert BalancedRemembered().watches(net) is net.head
    assert BalancedRemembered(module="body.1").watches(net) is net.body[1]
    assert BalancedRemembered().watches(net.head) is net.head  # a model that is a linear layer
    with pytest.raises(ValueError, match=r"no module 'haed'.*'head'"):
        BalancedRemembered(module="haed").watches(net)
    with pytest.raises(ValueError, match=r"does not end in a linear layer.*module="):
        BalancedRemembered().watches(nn.Sequential(nn.Conv2d(3, 3, 3)))


def test_what_does_not_fit_names_the_layer_and_the_fix():
    selector = BalancedRemembered(module="body")
    selector.watches(Net())
    batch = candidates(size=4, ids=torch.arange(4))
    for watched in (torch.zeros(8, 3), torch.zeros(4)):
        with pytest.raises(ValueError, match=r"'body'.*4 samples.*module="):
            selector.note(batch, None, watched)
    selector.note(batch, None, torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"'body' now has 5 channels, and 3.*channel_dim"):
        selector.note(batch, None, torch.zeros(4, 5))


@pytest.mark.parametrize("dim", [2, 3, 5])
def test_remembered_features_that_are_not_finite_are_unknown_and_reported(dim):
    selector = BalancedRemembered(num_samples=4, dim=dim)
    selector.watches(Net())
    watched = torch.tensor([[1.0, 2.0, 1.0], [1.0, math.nan, 0.0], [math.inf, 0.0, 0.0]])
    selector.note(candidates(size=3, ids=torch.arange(3)), None, watched)
    assert selector.state_dict()["features"].isnan().all(1).tolist() == [False, True, True, True]
    assert len(selector.select(candidates(size=4, ids=torch.arange(4)), 2).indices) == 2
    with pytest.raises(FloatingPointError, match="'head'"):
        selector.check()
    selector.check()
    selector.note(candidates(size=3, ids=torch.arange(3)), None, randn(3, 3))
    assert selector.state_dict()["features"].isnan().all(1).tolist() == [False, False, False, True]
    selector.check()


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    selector = BalancedRemembered(num_samples=5)
    selector.note(candidates(size=5, ids=torch.arange(5)), None, randn(5, 3))
    good = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in selector.state_dict().items()}
    for change in (
        {"features": torch.zeros(5, 63)},
        {"features": torch.zeros(4, 64)},
        {"losses": torch.zeros(5, 2)},
        {"width": -1},
        {"more": 0},
    ):
        with pytest.raises(ValueError, match="state"):
            selector.load_state_dict({**good, "losses": torch.ones(5, 1), **change})
    with pytest.raises(ValueError, match=r"has \['features', 'losses', 'width'\], this one has \['losses'\]"):
        selector.load_state_dict({"losses": torch.zeros(5, 1)})
    after = selector.state_dict()
    assert torch.equal(after["features"], good["features"])
    assert after["losses"].isnan().all()
    assert after["width"] == 3


# ------------------------------------------------------------------------------------------------- several ranks


def remember(rank, steps):
    """Ranks with different numbers of batches share what they remember."""
    ranks, selector = Ranks(), BalancedRemembered(dim=4)
    for step in range(4):
        if step >= steps[rank]:
            ranks.send_nothing()
            continue
        ids = torch.arange(4) + 4 * (2 * step + rank)
        batch = Candidates(4, generator(step), ids=ids, ranks=ranks)
        retained = selector.select(batch, 3).indices
        selector.learn(batch, retained)
        selector.note(batch, retained, randn(100, 6)[ids][retained])
        selector.observe(batch, retained, ids[retained].float())
    selector.check()
    return selector.state_dict(), selector.select(Candidates(16, generator(9), ids=torch.arange(16)), 8).indices


def test_ranks_remember_the_same_bits():
    (first, rows), (second, other_rows) = processes.run(2, remember, (4, 3))
    assert first["width"] == second["width"] == 6
    for name in ("features", "losses"):
        assert torch.equal(first[name].view(torch.int32), second[name].view(torch.int32))
    assert torch.equal(rows, other_rows)
    known = first["losses"].squeeze(1).isfinite()
    assert known.sum() == 7 * 3
    assert torch.equal(first["losses"][known].squeeze(1), torch.arange(len(known))[known].float())
    torch.testing.assert_close(first["features"][known], randn(100, 6)[: len(known)][known] @ projection(6, 4))


def train(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    selector = BalancedRemembered(num_samples=40)
    blocker = ForwardBlocker(model, None, 0.4, selector=selector, timeout=20)
    for step in range(3):
        ids = torch.arange(10) + 20 * (step % 2) + 10 * rank
        x, y = blocker(randn(40, 3, 6, 6)[ids], ids % 4, ids=ids)
        losses = F.cross_entropy(model(x), y, reduction="none")
        blocker.observe(losses)
        losses.mean().backward()
    return selector.state_dict()


def test_ranks_in_a_training_loop_remember_the_same_bits():
    first, second = processes.run(2, train)
    for name in ("features", "losses"):
        assert torch.equal(first[name].view(torch.int32), second[name].view(torch.int32))
    assert first["features"].isfinite().all(1).sum() >= 24
