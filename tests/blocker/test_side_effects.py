"""Models whose forward pass changes them, or their input."""

import copy

import pytest
import torch

from halfway import ForwardBlocker, Schedule
from tests.helpers.training_loop import (
    Plain,
    identical,
    optimizer_of,
    train_step,
    vectors,
)


class Remembering(Plain):
    """Counts its calls and collects an auxiliary loss in each, in the shallow and in the deep part."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.losses = []
        self.deep_shapes = {}

    def forward(self, x):
        self.calls += 1
        self.losses.append(x.square().mean() * self.stem.weight.sum())
        x = self.stem(x)
        self.deep_shapes[self.calls] = len(x)
        return self.deep(x)


@pytest.mark.parametrize("reuse", ["auto", "recompute"])
@pytest.mark.parametrize("schedule", [None, Schedule(2, unit="step")])
def test_attributes_move_once_per_step(reuse, schedule):
    model = Remembering()
    blocker = ForwardBlocker(model, "stem", 0.5, reuse=reuse, schedule=schedule)
    optimizer = optimizer_of(model)
    for i, (x, y) in enumerate(vectors(4)):
        x, y = blocker(x, y)
        assert model.calls == i
        assert len(model.losses) == i
        train_step(model, optimizer, x, y)
        assert model.calls == i + 1
        assert len(model.losses) == i + 1
        assert model.losses[-1].requires_grad
    pruned = [10, 10, 5, 5] if schedule else [5, 5, 5, 5]
    assert list(model.deep_shapes.values()) == pruned


class Overwriting(Plain):
    def forward(self, x):
        x.mul_(2).add_(1)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:halfway computes")
@pytest.mark.parametrize("reuse", ["auto", "recompute"])
def test_a_model_that_changes_its_input_trains_right_and_leaves_the_batch_alone(reuse):
    model = Overwriting()
    plain = copy.deepcopy(model)
    blocker = ForwardBlocker(model, "stem", 0.5, reuse=reuse)
    optimizer, reference = optimizer_of(model), optimizer_of(plain)
    for x, y in vectors(5):
        before = x.clone()
        x_, y_ = blocker(x, y)
        rows = blocker.last.indices
        assert torch.equal(x_, before[rows])
        train_step(model, optimizer, x_, y_)
        assert torch.equal(x, before)
        train_step(plain, reference, before[rows], y[rows])
    assert identical(model, plain)


def test_a_model_that_changes_its_input_is_recomputed_with_one_warning():
    model = Overwriting()
    blocker = ForwardBlocker(model, "stem", 0.5)
    first, *others = vectors(3)
    with pytest.warns(UserWarning, match="changes its input in place"):
        x = blocker(first[0])
    model(x)
    for x, _ in others:
        model(blocker(x))  # a second warning would be an error
    assert blocker.stats.recompute_reasons == {"the model changes its input in place": 3}
