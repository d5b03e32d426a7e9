"""Pruning ratios that change: what they are at each point of a run, what they cost, and that a state knows them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import halfway
from halfway.ratios import MOST, Ratios
from halfway.schedule import Schedule


def values(given, schedule: Schedule, length: int) -> list[float]:
    ratios = Ratios(given, schedule)
    return [ratios.at(position) for position in range(length)]


def test_a_number_is_the_same_everywhere() -> None:
    assert values(0.3, Schedule(), 5) == [0.3] * 5


@pytest.mark.parametrize(("start", "stop"), [(0, 8), (3, 11), (5, 180), (0, 2)])
def test_a_ramp_goes_from_its_first_to_its_last_ratio_within_the_schedule(start: int, stop: int) -> None:
    found = values(halfway.ramp(0.1, 0.8), Schedule(start, stop), stop)[start:]
    assert found[0] == pytest.approx(0.1)
    assert found[-1] == pytest.approx(0.8)
    assert found == sorted(found)
    assert len(set(found)) <= MOST
    linear = torch.linspace(0.1, 0.8, stop - start, dtype=torch.float64)
    # Half a step of at most 8.
    assert (torch.tensor(found, dtype=torch.float64) - linear).abs().max() <= 0.7 / 7 / 2 + 1e-9


def test_a_ramp_of_up_to_8_epochs_is_exact() -> None:
    assert values(halfway.ramp(0.0, 0.6), Schedule(1, 5), 5)[1:] == pytest.approx([0.0, 0.2, 0.4, 0.6])


def test_a_ramp_may_go_down() -> None:
    assert values(halfway.ramp(0.8, 0.0), Schedule(0, 3), 3) == pytest.approx([0.8, 0.4, 0.0])


def test_a_ramp_without_an_end_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"schedule=halfway\.Schedule\(start, stop\)"):
        Ratios(halfway.ramp(0.0, 0.5), Schedule())


def test_steps_begin_where_they_say() -> None:
    assert values(halfway.steps({2: 0.3, 4: 0.5}), Schedule(), 6) == [0.0, 0.0, 0.3, 0.3, 0.5, 0.5]


def test_a_function_is_known_by_its_values() -> None:
    def ratio(epoch: int) -> float:
        return 0.2 if epoch < 3 else 0.4

    assert values(ratio, Schedule(0, 5), 5) == [0.2, 0.2, 0.2, 0.4, 0.4]
    assert Ratios(ratio, Schedule(0, 5)).config() == [[0, 0.2], [3, 0.4]]
    assert Ratios(lambda e: [0.1, 0.2][e], Schedule()).config() == [[0, 0.1], [1, 0.2]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda e: e / 100, "99 different values"),
        (halfway.steps({e: e / 10 for e in range(9)}), "9 different values"),
        (lambda e: 1.0, r"prune_ratio\(0\)"),
        (1.5, "prune_ratio"),
    ],
)
def test_what_would_mean_too_many_batch_sizes_or_none_is_an_error(given, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ratios(given, Schedule(0, 99))


@pytest.mark.parametrize("table", [{}, {-1: 0.2}, [0.1], {0: 1.0}, {0.5: 0.1}])
def test_steps_that_make_no_sense_are_an_error(table) -> None:
    with pytest.raises((TypeError, ValueError)):
        halfway.steps(table)


def test_the_cost_of_a_run_is_the_mean_of_its_epochs() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    x, schedule = torch.randn(2, 4), Schedule(2, 6)
    found = halfway.cost(model, "0", halfway.ramp(0.0, 0.6), x, schedule=schedule, length=10)
    each = [halfway.cost(model, "0", p, x).step for p in (0.0, 0.2, 0.4, 0.6)]
    assert found.run == pytest.approx((sum(each) + 6) / 10)
    with pytest.raises(ValueError, match="length="):
        halfway.cost(model, "0", halfway.steps({0: 0.1, 3: 0.5}), x)


NET = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def blocker_of(ratio, **options) -> halfway.ForwardBlocker:
    return halfway.ForwardBlocker(NET, "0", ratio, selector="random", schedule=Schedule(0, 4), **options)


def test_a_blocker_prunes_what_the_epoch_says() -> None:
    sizes = []
    with blocker_of(halfway.ramp(0.0, 0.6)) as blocker:
        for epoch in range(5):
            blocker.set_epoch(epoch)
            sizes.append(len(blocker(torch.randn(10, 4))))
            assert blocker.prune_ratio == pytest.approx(min(epoch, 3) * 0.2)
    assert sizes == [10, 8, 6, 4, 10]


def test_the_first_batch_is_rehearsed_for_the_largest_ratio() -> None:
    """A demanded replay that is impossible is an error at once, also where the first epochs prune nothing."""

    class Mixes(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), Mixes(), nn.Linear(8, 8)), nn.Linear(8, 2))
    blocker = halfway.ForwardBlocker(model, "0.2", halfway.steps({3: 0.5}), reuse="replay")
    blocker.set_epoch(0)
    blocker(torch.randn(10, 4))
    assert "computed" in blocker.explain()


def test_epochs_must_be_told_where_the_ratio_changes() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    blocker = halfway.ForwardBlocker(model, "0", halfway.steps({0: 0.2, 3: 0.5}))
    with pytest.raises(RuntimeError, match="set_epoch"):
        blocker(torch.randn(10, 4))


def test_a_state_is_only_loaded_where_the_ratios_are_the_same() -> None:
    with blocker_of(halfway.ramp(0.0, 0.6)) as blocker:
        state = blocker.state_dict()
    with blocker_of(lambda e: round(e * 0.2, 12)) as same:
        same.load_state_dict(state)
    with blocker_of(halfway.ramp(0.0, 0.4)) as other, pytest.raises(ValueError, match="prune_ratio"):
        other.load_state_dict(state)


def test_a_batch_sampler_prunes_what_the_epoch_says() -> None:
    batches = halfway.PrunedBatchSampler(range(40), 10, halfway.ramp(0.0, 0.6), schedule=Schedule(0, 4))
    sizes = []
    for epoch in range(5):
        batches.set_epoch(epoch)
        sizes.append({len(batch) for batch in batches})
    assert sizes == [{10}, {8}, {6}, {4}, {10}]
