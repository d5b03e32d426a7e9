"""When the blocker prunes: within its window, in training, and what it learns and costs outside of them."""

import copy

import pytest
import torch

from halfway import Density, ForwardBlocker, Schedule
from tests.helpers.training_loop import (
    Net,
    Plain,
    batches,
    generators,
    hooks_of,
    optimizer_of,
    train_step,
    vectors,
)


def test_a_schedule_in_steps_prunes_in_its_window_and_needs_no_epochs():
    model = Plain()
    blocker = ForwardBlocker(model, "stem", 0.5, schedule=Schedule(2, 4, unit="step"))
    lengths = []
    for x, _ in vectors(6):
        x = blocker(x)
        model(x)
        lengths.append(len(x))
        model.eval()
        blocker(torch.randn(3, 4))  # not a training batch: does not count
        model.train()
    assert lengths == [10, 10, 5, 5, 10, 10]


def test_set_epoch_opens_and_closes_the_window():
    model = Plain()
    blocker = ForwardBlocker(model, "stem", 0.5, schedule=Schedule(1, 3))
    lengths = []
    for epoch in range(4):
        blocker.set_epoch(epoch)
        for x, _ in vectors(2):
            x = blocker(x)
            model(x)
            lengths.append(len(x))
        assert (blocker.last is None) == (epoch in (0, 3))
    assert lengths == [10, 10, 5, 5, 5, 5, 10, 10]


def test_outside_the_schedule_nothing_runs_twice_and_the_estimator_sees_every_sample():
    model = Net()
    selector = Density(num_centroids=16)
    blocker = ForwardBlocker(model, "block", 0.5, selector=selector, schedule=Schedule(5))
    blocker.set_epoch(0)
    calls = []
    model.stem.register_forward_hook(lambda *_: calls.append(1))
    optimizer = optimizer_of(model)
    for i, (x, y) in enumerate(batches(6)):
        calls.clear()
        train_step(model, optimizer, *blocker(x, y))
        if i > 0:
            assert len(calls) == 1
        assert selector.estimator.counts.sum() == (i + 1) * len(x)


def test_in_the_window_the_shallow_part_runs_twice_and_the_estimator_sees_the_retained():
    model = Net()
    selector = Density(num_centroids=4)
    blocker = ForwardBlocker(model, "block", 0.4, selector=selector)
    calls = []
    model.stem.register_forward_hook(lambda *_: calls.append(1))
    deep = []
    model.deep.register_forward_hook(lambda module, args, out: deep.append(len(out)))
    optimizer = optimizer_of(model)
    for i, (x, y) in enumerate(batches(4)):
        calls.clear()
        deep.clear()
        train_step(model, optimizer, *blocker(x, y))
        if i > 0:
            assert len(calls) == 2
            assert deep == [6]
        assert selector.estimator.counts.sum() == (i + 1) * 6


def test_a_validation_pass_between_steps_does_not_teach_the_estimator():
    model = Plain()
    selector = Density(num_centroids=4)
    blocker = ForwardBlocker(model, "stem", 0.5, selector=selector, schedule=Schedule(5))
    blocker.set_epoch(0)
    x, _ = blocker(*vectors(1)[0])
    model.eval()
    model(torch.randn(7, 4))
    model.train()
    with torch.no_grad():
        model(torch.randn(7, 4))
    assert selector.estimator is None
    model(x)
    assert selector.estimator.counts.sum() == len(x)


@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_without_training_the_batch_comes_back_untouched(how):
    model = Net()
    blocker = ForwardBlocker(model, "block", 0.5)
    calls = []
    model.stem.register_forward_hook(lambda *_: calls.append(1))
    (x, y), before, state = batches(1)[0], generators(), copy.deepcopy(model.state_dict())
    values = x.clone()
    if how == "eval":
        model.eval()
    with torch.set_grad_enabled(how != "no_grad"):
        x_, y_ = blocker(x, y)
        assert x_ is x
        assert y_ is y
        assert blocker(x) is x
        named = blocker(x=x, y=y)
        assert named["x"] is x
        assert named["y"] is y
    assert not calls
    assert generators() == before
    assert torch.equal(x, values)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert hooks_of(model) == [("stem", "_forward_hooks")]
    assert blocker.stats.steps == 0
