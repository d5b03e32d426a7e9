"""Which samples the blocker retains: by its seed alone, whatever their order, and exactly as many as asked."""

import copy

import pytest
import torch

import halfway
from halfway import Density, ForwardBlocker, Schedule
from tests.helpers.training_loop import (
    Plain,
    optimizer_of,
    selections,
    vectors,
)


def run_with_seed(seed, **settings):
    torch.manual_seed(0)
    model = Plain()
    blocker = ForwardBlocker(model, "stem", 0.5, seed=seed, **settings)
    return selections(blocker, model, optimizer_of(model), vectors(8))


@pytest.mark.parametrize("selector", [lambda: "random", lambda: Density(num_centroids=8, noise=0.5)])
def test_the_same_seed_gives_the_same_choice_and_another_seed_another(selector):
    assert run_with_seed(1, selector=selector()) == run_with_seed(1, selector=selector())
    assert run_with_seed(1, selector=selector()) != run_with_seed(2, selector=selector())


def test_the_choice_does_not_depend_on_the_global_generators():
    first = run_with_seed(1)
    torch.manual_seed(77)
    assert run_with_seed(1) == first


def test_steps_draw_different_samples():
    model = Plain()
    blocker = ForwardBlocker(model, None, 0.5, selector="random")
    x = torch.randn(32, 4)
    blocker(x)
    first = blocker.last.indices
    blocker(x)
    assert not torch.equal(first, blocker.last.indices)


def test_shuffling_the_batch_permutes_the_selection():
    torch.manual_seed(0)
    model = Plain()
    fill, (x, y) = vectors(1, size=16)[0], vectors(1, size=24, seed=9)[0]
    order = torch.randperm(24)
    chosen = []
    for rows in (torch.arange(24), order):
        twin = copy.deepcopy(model)
        blocker = ForwardBlocker(twin, "stem", 0.5, selector=Density(8, noise=0), schedule=Schedule(1, unit="step"))
        twin(blocker(*fill)[0])
        twin(blocker(x[rows], y[rows])[0])
        chosen.append(rows[blocker.last.indices].sort().values)
    assert torch.equal(*chosen)
    assert len(chosen[0]) == 12
    assert not torch.equal(chosen[0], torch.arange(12))


def test_every_part_is_cut_to_the_rows_that_last_names():
    model = Plain()
    blocker = ForwardBlocker(model, "stem", 0.3)
    for x, y in vectors(3):
        x_, y_, index = blocker(x, y, torch.arange(10))
        selection = blocker.last
        assert isinstance(selection, halfway.Selection)
        assert selection.indices.dtype == torch.int64
        assert torch.equal(index, selection.indices)
        assert torch.equal(x_, x[selection.indices])
        assert torch.equal(y_, y[selection.indices])
        assert torch.equal(selection.indices, selection.indices.unique())
        assert selection.importance.shape == (10,)
        assert selection.weights is None
        model(x_)


@pytest.mark.parametrize(
    ("size", "ratio", "count"), [(10, 0.3, 7), (128, 0.3, 90), (1, 0.9, 1), (3, 0.9, 1), (5, 0.5, 3)]
)
def test_the_count_is_exact_and_at_least_one(size, ratio, count):
    blocker = ForwardBlocker(Plain(), None, ratio, selector="random")
    assert len(blocker(torch.randn(size, 4))) == count
