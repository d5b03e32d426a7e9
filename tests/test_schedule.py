"""When to prune."""

import dataclasses

import pytest

from halfway.schedule import Schedule


def test_pruning_starts_at_start_and_ends_before_stop():
    schedule = Schedule(5, 8)
    assert [at for at in range(12) if schedule.active(at)] == [5, 6, 7]


def test_without_a_stop_pruning_never_ends():
    schedule = Schedule(3)
    assert not schedule.active(2)
    assert schedule.active(3)
    assert schedule.active(10**9)


def test_the_default_prunes_in_every_epoch():
    schedule = Schedule()
    assert schedule.unit == "epoch"
    assert schedule.active(0)
    assert schedule.always


@pytest.mark.parametrize("schedule", [Schedule(1), Schedule(0, 100), Schedule(5, 180)])
def test_a_window_is_not_always(schedule):
    assert not schedule.always


def test_an_empty_window_never_prunes():
    schedule = Schedule(4, 4)
    assert not any(schedule.active(at) for at in range(10))
    assert schedule.share(10) == 0


@pytest.mark.parametrize(
    ("start", "stop", "length", "expected"),
    [
        (5, 180, 200, 0.875),  # the paper's windows
        (5, 80, 90, 75 / 90),
        (15, 265, 300, 250 / 300),
        (0, None, 7, 1.0),
        (5, None, 20, 0.75),
        (5, 180, 100, 0.95),  # the run ends before the window does
        (50, 80, 30, 0.0),  # or before it begins
    ],
)
def test_share_is_the_pruned_part_of_the_run(start, stop, length, expected):
    assert Schedule(start, stop).share(length) == pytest.approx(expected)


@pytest.mark.parametrize("window", [(0, None), (3, None), (0, 4), (2, 7), (6, 6), (9, 20)])
def test_share_counts_the_active_epochs(window):
    schedule = Schedule(*window)
    for length in range(1, 25):
        assert schedule.share(length) == pytest.approx(sum(map(schedule.active, range(length))) / length)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"unit": "batch"}, "unit must be 'epoch' or 'step', got 'batch'"),
        ({"start": -1}, "start must be at least 0, got -1"),
        ({"start": 5, "stop": 4}, r"stop \(4\) lies before start \(5\)"),
        ({"stop": -1}, r"stop \(-1\) lies before start \(0\)"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**arguments)


@pytest.mark.parametrize("length", [0, -3])
def test_the_share_of_no_run_at_all_is_refused(length):
    with pytest.raises(ValueError, match=f"length must be at least 1 step, got {length}"):
        Schedule(unit="step").share(length)


def test_a_schedule_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Schedule().start = 3
