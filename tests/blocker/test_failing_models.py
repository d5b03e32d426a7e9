"""Models that raise, or give features that are not finite or of another width: said, and nothing is left half-done."""

import copy

import pytest
import torch
from torch import nn

from halfway import Density, ForwardBlocker, Schedule
from tests.helpers.bad_input import Net, assert_trains, assert_unchanged, good, with_nan, world

# ----------------------------------------------------------------------------------------------- the model fails


class Picky(Net):
    """Raises, in its shallow part after a random draw, on batches of one of the sizes it does not like."""

    def __init__(self, *sizes):
        super().__init__()
        self.sizes = sizes

    def forward(self, x):
        x = self.drop(self.norm(self.stem(x)))
        if len(x) in self.sizes:
            raise ArithmeticError("this model does not like its batch")
        return self.head(self.cut(x))


@pytest.mark.parametrize(("size", "reuse"), [(8, "auto"), (8, "recompute"), (4, "auto")])
def test_a_forward_that_raises_on_the_first_batch_leaves_no_trace(size, reuse):
    model = Picky(size)
    blocker = ForwardBlocker(model, "cut", 0.5, reuse=reuse)
    before = world(model)
    with pytest.raises(ArithmeticError, match="does not like"):
        blocker(*good())
    assert_unchanged(model, before)
    model.sizes = ()
    assert_trains(blocker, model)


def test_a_forward_that_raises_later_leaves_no_trace():
    model = Picky(10)
    blocker = ForwardBlocker(model, "cut", 0.5)
    assert_trains(blocker, model)
    before, stats = world(model), blocker.stats
    with pytest.raises(ArithmeticError, match="does not like"):
        blocker(*good(10))
    assert_unchanged(model, before)
    assert blocker.stats == stats
    assert_trains(blocker, model)


@pytest.mark.parametrize("schedule", [None, Schedule(1, unit="step")], ids=["pruning", "first pruned step"])
def test_a_forward_that_raises_on_the_retained_samples_of_a_later_step_counts_nothing(schedule):
    """Another batch size, so the step is rehearsed, and the rehearsal raises."""
    model = Picky()
    selector = Density(num_centroids=4)
    blocker = ForwardBlocker(model, "cut", 0.5, selector=selector, schedule=schedule)
    model(blocker(*good())[0])
    model.sizes = (6,)
    before, stats, last = world(model), blocker.stats, blocker.last
    learned = selector.estimator.counts.clone()
    with pytest.raises(ArithmeticError, match="does not like"):
        blocker(*good(12))
    assert_unchanged(model, before)
    assert blocker.stats == stats
    assert blocker.last is last
    assert torch.equal(selector.estimator.counts, learned)
    assert_trains(blocker, model)


# ------------------------------------------------------------------------------------ values that are not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_features_that_are_not_finite_at_the_first_step_are_an_error_that_names_the_layer(value):
    model = Net()
    model.norm = nn.Identity()
    blocker = ForwardBlocker(model, "cut", 0.5, selector=Density(num_centroids=4))
    x, y = good()
    x[2, 1] = value
    before = world(model)
    with pytest.raises(FloatingPointError, match=r"'cut'.*not finite"):
        blocker(x, y)
    assert_unchanged(model, before)
    assert blocker.stats.steps == 0
    assert_trains(blocker, model)


def test_features_that_are_not_finite_at_the_first_step_before_the_window_are_an_error_too():
    model = Net()
    blocker = ForwardBlocker(model, "cut", 0.5, selector=Density(num_centroids=4), schedule=Schedule(1, unit="step"))
    with pytest.raises(FloatingPointError, match=r"'cut'.*not finite"):
        model(blocker(*with_nan())[0])


@pytest.mark.parametrize(
    "ask", [lambda b: b.set_epoch(1), lambda b: b.stats, lambda b: b.state_dict()], ids=["set_epoch", "stats", "state"]
)
@pytest.mark.parametrize("pruning", [True, False])
def test_features_that_are_not_finite_later_prune_at_random_and_are_reported_at_the_next_question(ask, pruning):
    model = Net()
    model.norm = nn.Identity()
    selector = Density(num_centroids=4)
    schedule = None if pruning else Schedule(50, unit="step")
    blocker = ForwardBlocker(model, "cut", 0.5, selector=selector, schedule=schedule)
    for _ in range(3):
        model(blocker(*good())[0])
    learned = copy.deepcopy(selector.estimator.state_dict())
    chosen = []
    for _ in range(4):
        x, _ = blocker(*with_nan())
        assert len(x) == (4 if pruning else 8)
        if pruning:
            assert blocker.last.importance.isfinite().all()
            chosen.append(blocker.last.indices.tolist())
        model(x)
    if pruning:
        assert len({tuple(c) for c in chosen}) > 1
    for name, value in selector.estimator.state_dict().items():
        assert torch.equal(value, learned[name])
    with pytest.raises(FloatingPointError, match=r"'cut'.*not finite"):
        ask(blocker)
    ask(blocker)
    x, _ = blocker(*good())
    model(x)
    assert selector.estimator.counts.sum() > learned["counts"].sum()


# ------------------------------------------------------------------------------------------ features that change


def test_features_of_another_width_are_refused_and_nothing_is_counted():
    class Widening(nn.Module):
        width = 6

        def __init__(self):
            super().__init__()
            self.cut = nn.Identity()
            self.head = nn.Linear(1, 3)

        def forward(self, x):
            return self.head(self.cut(x[:, : self.width]).mean(1, keepdim=True))

    model = Widening()
    selector = Density(num_centroids=2)
    blocker = ForwardBlocker(model, "cut", 0.5, selector=selector)
    x = torch.randn(8, 10)
    model(blocker(x))
    Widening.width = 9
    before, stats = world(model), blocker.stats
    counts = selector.estimator.counts.clone()
    with pytest.raises(ValueError, match=r"'cut' now have 9 channels.*made for 6.*channel_dim"):
        blocker(x)
    assert_unchanged(model, before)
    assert blocker.stats == stats
    assert torch.equal(selector.estimator.counts, counts)
    Widening.width = 6
    assert len(model(blocker(x))) == 4
