"""A training in which nothing is pruned says so: once, and with the fix."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from halfway import ForwardBlocker, Schedule


@contextlib.contextmanager
def silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def epoch(blocker: ForwardBlocker, number: int, size: int, steps: int = 2) -> None:
    blocker.set_epoch(number)
    for _ in range(steps):
        blocker(torch.randn(size, 6))


# -------------------------------------------------------------------------------------------------------- eval mode


@pytest.mark.parametrize("selector", ["density", "random", "loss"])
def test_training_in_eval_mode_is_said_once_with_the_fix(selector: str) -> None:
    model = network().eval()
    blocker = ForwardBlocker(model, None if selector == "random" else "2", 0.5, selector=selector)
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    words = r"eval mode, so nothing is pruned.*model.train\(\).*BatchNorm2d.*torch.no_grad\(\)"
    with pytest.warns(UserWarning, match=words) as seen:
        assert len(blocker(x, y)[0]) == 8
    assert seen[0].filename == __file__
    with silence():
        blocker(x, y)
    assert blocker.stats.steps == 0


def test_the_fix_works() -> None:
    model = network()
    model.train()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm1d):
            m.eval()
    blocker = ForwardBlocker(model, "2", 0.5)
    with silence():
        assert len(model(blocker(torch.randn(8, 6)))) == 4


def test_an_evaluation_without_grad_is_not_meant() -> None:
    model = network()
    blocker = ForwardBlocker(model, "2", 0.5)
    with silence():
        model(blocker(torch.randn(8, 6)))
        model.eval()
        for without in (torch.no_grad, torch.inference_mode):
            with without():
                assert len(blocker(torch.randn(8, 6))) == 8
        model.train()
        with torch.no_grad():
            assert len(blocker(torch.randn(8, 6))) == 8


def test_nothing_is_said_where_nothing_should_be_pruned() -> None:
    with silence():
        ForwardBlocker(network().eval(), "2", 0.0)(torch.randn(8, 6))


# ------------------------------------------------------------------------------------------------- batches too small


@pytest.mark.parametrize(
    ("ratio", "size", "enough"), [(0.1, 5, 6), (0.1, 1, 6), (0.01, 50, 51), (0.5, 1, 2), (0.9, 1, 2), (0.25, 2, 3)]
)
def test_an_epoch_of_batches_too_small_to_prune_is_said_with_the_size_that_is_not(
    ratio: float, size: int, enough: int
) -> None:
    blocker = ForwardBlocker(network(), None, ratio, selector="random")
    with silence():
        epoch(blocker, 0, size)
    with pytest.warns(UserWarning, match=rf"nothing was pruned in epoch 0.*fewer than {enough}.*larger") as seen:
        blocker.set_epoch(1)
    assert seen[0].filename == __file__
    with silence():
        for number in range(1, 4):
            epoch(blocker, number, size)
        epoch(blocker, 4, enough)
    assert blocker.stats.pruned_steps == 2
    if size > 1:
        with silence():
            epoch(blocker, 5, enough - 1)
    assert blocker.stats.pruned_steps == 2


SILENT = {
    "pruned once": (None, 0.1, [5, 5, 6]),
    "before the window": (Schedule(3), 0.1, [5]),
    "after the window": (Schedule(0, 0), 0.1, [5]),
    "nothing to prune": (None, 0.0, [5]),
    "no batches at all": (None, 0.1, []),
    "steps before the window": (Schedule(10, unit="step"), 0.1, [5, 5]),
    "steps after the window": (Schedule(0, 0, unit="step"), 0.1, [5, 5]),
}


@pytest.mark.parametrize("case", SILENT)
def test_epochs_that_are_as_they_should_be_are_not_mentioned(case: str) -> None:
    schedule, ratio, sizes = SILENT[case]
    blocker = ForwardBlocker(network(), None, ratio, selector="random", schedule=schedule)
    with silence():
        for number in range(3):
            blocker.set_epoch(number)
            for size in sizes:
                blocker(torch.randn(size, 6))


def test_a_window_in_steps_that_lies_in_the_epoch_counts() -> None:
    blocker = ForwardBlocker(network(), None, 0.1, selector="random", schedule=Schedule(5, 6, unit="step"))
    with silence():
        epoch(blocker, 0, 5, steps=4)
        epoch(blocker, 1, 5, steps=4)
    with pytest.warns(UserWarning, match="nothing was pruned in epoch 1"):
        blocker.set_epoch(2)


def test_epochs_before_a_state_was_loaded_do_not_count() -> None:
    model = network()
    first = ForwardBlocker(model, None, 0.1, selector="random")
    with silence():
        epoch(first, 0, 5)
        state = first.state_dict()
        first.remove()
        second = ForwardBlocker(model, None, 0.1, selector="random")
        second.set_epoch(0)
        second.load_state_dict(state)
        second.set_epoch(1)
        epoch(second, 1, 6)
        second.set_epoch(2)


@pytest.mark.parametrize(
    ("window", "first", "end", "meets"),
    [
        ((0, None), 0, 1, True),
        ((3, 5), 0, 3, False),
        ((3, 5), 0, 4, True),
        ((3, 5), 4, 9, True),
        ((3, 5), 5, 9, False),
        ((3, 3), 0, 9, False),
        ((3, 5), 4, 4, False),
        ((0, None), 7, 7, False),
    ],
)
def test_a_window_meets_a_stretch_if_it_is_active_somewhere_in_it(
    window: tuple[int, int | None], first: int, end: int, meets: bool
) -> None:
    schedule = Schedule(*window)
    assert schedule.meets(first, end) is meets
    assert meets is any(map(schedule.active, range(first, end)))
