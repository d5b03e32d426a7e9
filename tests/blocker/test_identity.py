"""The blocker in a training loop: bit-identical where nothing is pruned, and where all is recomputed."""

import copy

import pytest
import torch
import torch.nn.functional as F

from halfway import Density, ForwardBlocker, Schedule
from tests.helpers.training_loop import (
    Net,
    batches,
    generators,
    identical,
    optimizer_of,
    seed_all,
    selections,
    train_step,
)


@pytest.mark.parametrize("reuse", ["auto", "replay", "recompute"])
@pytest.mark.parametrize(
    ("ratio", "schedule", "epoch"),
    [(0.0, None, 0), (0.4, Schedule(5, 9), 4), (0.4, Schedule(5, 9), 9), (0.4, Schedule(20, None, "step"), None)],
    ids=["ratio 0", "before the window", "after the window", "before the first step"],
)
def test_training_is_bit_identical_where_nothing_is_pruned(ratio, schedule, epoch, reuse):
    plain = Net()
    model = copy.deepcopy(plain)
    data = batches(20)

    seed_all()
    optimizer = optimizer_of(plain)
    for x, y in data:
        train_step(plain, optimizer, x, y)
    expected = generators()

    seed_all()
    blocker = ForwardBlocker(model, "block", ratio, schedule=schedule, reuse=reuse)
    optimizer = optimizer_of(model)
    for x, y in data:
        if epoch is not None:
            blocker.set_epoch(epoch)
        x_, y_ = blocker(x, y)
        assert x_ is x
        assert y_ is y
        train_step(model, optimizer, x_, y_)

    assert generators() == expected
    assert identical(model, plain)
    assert blocker.last is None
    assert blocker.stats.relative_flops == 1


@pytest.mark.parametrize("selector", ["density", "random"])
def test_recompute_is_bit_identical_to_training_on_the_retained_samples(selector):
    plain = Net()
    model = copy.deepcopy(plain)
    data = batches(20)
    if selector == "density":
        selector = Density(num_centroids=4)

    seed_all()
    blocker = ForwardBlocker(model, "block", 0.4, reuse="recompute", selector=selector)
    chosen = selections(blocker, model, optimizer_of(model), data)
    after = generators()

    seed_all()
    optimizer = optimizer_of(plain)
    for (x, y), rows in zip(data, chosen, strict=True):
        assert len(rows) == 6
        train_step(plain, optimizer, x[rows], y[rows])
    assert generators() == after
    assert identical(model, plain)


def test_the_generators_after_the_blocker_are_those_before_it_when_recomputing():
    model = Net()
    blocker = ForwardBlocker(model, "block", 0.4, reuse="recompute")
    for x, y in batches(3):
        before = generators()
        blocker(x, y)
        assert generators() == before


def test_replay_moves_each_torch_generator_once_per_step():
    """Dropout in the shallow part draws in the probe, the deep part in the model's call: nothing is drawn twice."""
    model = Net(batch_norm=False)
    blocker = ForwardBlocker(model, "block", 0.4)
    data = batches(3)
    x, y = blocker(*data[0])
    model(x)
    for x, y in data[1:]:
        before = torch.get_rng_state()
        x_, _ = blocker(x, y)
        model(x_)
        ours = torch.get_rng_state()
        torch.set_rng_state(before)
        F.dropout(torch.ones(len(x), 8, 8, 8), 0.2)
        F.dropout(torch.ones(len(x_), 16, 3, 3), 0.1)
        assert torch.equal(ours, torch.get_rng_state())
    assert blocker.stats.steps_replayed == 3
