"""The first batch: a wrong cut is said at once, and the rehearsal costs little and leaves nothing behind."""

import copy

import pytest
import torch
from torch import nn

from halfway import ForwardBlocker, ReplayError, Schedule
from tests.helpers.training_loop import (
    Net,
    Plain,
    batches,
    generators,
    hooks_of,
    vectors,
)


class Repeating(Net):
    def forward(self, x):
        return super().forward(self.block(self.stem(x))[:, :3])


@pytest.mark.parametrize(
    ("model", "at", "words"),
    [(Repeating(), "block", "more than once"), (nn.Sequential(Net(), nn.Identity()), "0.nothing", "never runs")],
)
@pytest.mark.parametrize("schedule", [None, Schedule(5)])
def test_a_wrong_cut_is_an_error_on_the_first_batch_also_before_the_window(model, at, words, schedule):
    if words == "never runs":
        model[0].nothing = nn.Linear(2, 2)
    blocker = ForwardBlocker(model, at, 0.5, schedule=schedule)
    blocker.set_epoch(0)
    (x, y), before, state = batches(1)[0], generators(), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=words):  # noqa: PT012 (that it runs twice only shows in the model's own call)
        x, y = blocker(x, y)
        assert generators() == before
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        model(x)
    assert hooks_of(model) == []


@pytest.mark.parametrize(("reuse", "more"), [("auto", [4, 8, 8]), ("recompute", [])])
@pytest.mark.parametrize("build", [Net, Plain])
def test_the_first_pruned_batch_costs_three_shallow_forwards_more(build, reuse, more):
    """One on the retained number of samples, two on all; a steady step is one on all, one on the retained."""
    model, seen, deep = build(), [], []
    model.stem.register_forward_pre_hook(lambda m, args: seen.append(len(args[0])))
    model.deep.register_forward_pre_hook(lambda m, args: deep.append(len(args[0])))
    blocker = ForwardBlocker(model, "block" if isinstance(model, Net) else "stem", 0.5, reuse=reuse)
    for step in range(3):
        x, _ = (batches if isinstance(model, Net) else vectors)(1)[0]
        model(blocker(x[:8])).sum().backward()
        assert sorted(seen) == sorted([8, 4, *(more if step == 0 else [])])
        assert deep == [4]
        seen.clear()
        deep.clear()


@pytest.mark.parametrize("schedule", [None, Schedule(5)])
@pytest.mark.parametrize("reuse", ["auto", "recompute"])
def test_the_first_batch_leaves_weights_and_buffers_as_they_were(schedule, reuse):
    model = Net()
    blocker = ForwardBlocker(model, "block", 0.5, schedule=schedule, reuse=reuse)
    blocker.set_epoch(0)
    (x, y), before, state = batches(1)[0], generators(), copy.deepcopy(model.state_dict())
    values = x.clone()
    part = blocker(x, y)
    assert len(part[0]) == (10 if schedule else 5)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(x, values)
    assert all(p.grad is None for p in model.parameters())
    if schedule is not None or reuse == "recompute":
        assert generators() == before
    model(part[0])


def test_replay_that_is_demanded_and_not_possible_is_an_error_on_the_first_batch_also_before_the_window():
    class Mixing(Plain):
        def forward(self, x):
            return self.deep(self.stem(x - x.mean(0)))

    model = Mixing()
    blocker = ForwardBlocker(model, "stem", 0.5, schedule=Schedule(5), reuse="replay")
    blocker.set_epoch(0)
    with pytest.raises(ReplayError, match="depends on other samples"):
        blocker(*vectors(1)[0])
    assert hooks_of(model) == []
