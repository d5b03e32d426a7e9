"""What all samplers promise: every sample once, in the epoch's order, pruned in the window, decided once."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from halfway import Schedule
from halfway.samplers import (
    RS2,
    UCB,
    DynUnc,
    EpsilonGreedy,
    InfoBatch,
    RandomSubset,
    make,
)
from halfway.seeds import seed_of
from tests.helpers.sampled import EVERY, N, feed, loss_table

# Most trainings here are shorter than its window; the tests of the warning ask for it.
pytestmark = pytest.mark.filterwarnings("ignore:dyn_unc")


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_without_pruning_every_sample_comes_once_per_epoch_with_weight_one(name: str, options: dict[str, Any]) -> None:
    sampler, losses = make(name, N, 0.0, **options), loss_table(3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        met = list(sampler)
        assert sorted(met) == list(range(N))
        assert {i.weight for i in met} == {1.0}
        feed(sampler, losses[epoch])
    assert sampler.effective_ratio == sampler.last_ratio == 0


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_the_order_is_the_epochs_permutation_without_the_pruned_samples(name: str, options: dict[str, Any]) -> None:
    sampler, losses = make(name, N, 0.4, seed=5, **options), loss_table(4)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        permutation = torch.randperm(N, generator=torch.Generator().manual_seed(seed_of(5, epoch))).tolist()
        retained = sampler.retained.tolist()
        assert retained == sorted(set(retained))
        assert list(sampler) == [i for i in permutation if i in retained] == list(sampler)
        assert len(sampler) == len(retained)
        feed(sampler, losses[epoch])
    unshuffled = make(name, N, 0.4, seed=5, shuffle=False, **options)
    unshuffled.set_epoch(0)
    assert list(unshuffled) == unshuffled.retained.tolist()


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_outside_its_window_all_samples_are_trained_on(name: str, options: dict[str, Any]) -> None:
    sampler, losses = make(name, N, 0.5, schedule=Schedule(1, 3), **options), loss_table(5)
    pruned = []
    for epoch in range(5):
        sampler.set_epoch(epoch)
        feed(sampler, losses[epoch])
        pruned.append(N - len(sampler.retained))
        assert sampler.last_ratio == pytest.approx(pruned[-1] / N)
        assert sampler.effective_ratio == pytest.approx(sum(pruned) / (N * len(pruned)))
        if not 1 <= epoch < 3:
            assert torch.equal(sampler.weights(torch.arange(N)), torch.ones(N))
    assert [bool(p) for p in pruned] == [False, True, True, False, False]


def test_seeds_make_other_choices_and_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    met = []
    for seed in (0, 0, 1):
        sampler = RS2(N, 0.5, seed=seed)
        sampler.set_epoch(3)
        met.append((sampler.retained.tolist(), list(sampler)))
    assert met[0] == met[1]
    assert met[0][0] != met[2][0]
    assert torch.equal(before, torch.get_rng_state())


def test_the_same_epoch_is_not_decided_twice() -> None:
    sampler = RS2(N, 0.5, replacement=False)
    sampler.set_epoch(0)
    first = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert set(sampler) | set(first) == set(range(N))
    assert sampler.effective_ratio == 0.5


@pytest.mark.parametrize("cls", [UCB, EpsilonGreedy, DynUnc, RS2])
def test_equal_samples_are_retained_at_random(cls: Any) -> None:
    times = torch.zeros(10)
    for seed in range(400):
        sampler = cls(10, 0.5, seed=seed, **({"replacement": False} if cls is RS2 else {}))
        sampler.observe(torch.arange(0, 10), torch.ones(10))
        sampler.set_epoch(0)
        times[sampler.retained] += 1
    assert (times - 200).abs().max() < 5 * 10


@pytest.mark.parametrize(("cls", "options"), [(UCB, {"period": 1}), (DynUnc, {"window": 2})])
def test_a_loss_that_is_not_finite_makes_its_sample_unknown_and_later_ones_count_again(cls: Any, options: Any) -> None:
    sampler, ids = cls(4, 0.25, **options), torch.arange(4)
    for epoch, losses in enumerate([[1.0, 2, 3, 4], [4.0, 3, 2, 1], [1.0, 3, 2, math.inf]]):
        sampler.set_epoch(epoch)
        sampler.observe(ids, torch.tensor(losses))
    sampler.set_epoch(3)
    assert 3 in sampler.retained
    assert sampler.memory.values.isfinite().all(1).tolist() == [True, True, True, False]
    for loss in (0.5, 0.5, 0.5):
        sampler.observe(torch.tensor([3]), torch.tensor([loss]))
    sampler.set_epoch(4)
    assert sampler.retained.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("sampler", "settings"),
    [
        (lambda: UCB(N, 0.5, c=2.0, seed=3), {"alpha": 0.8, "period": 10, "c": 2.0}),
        (lambda: EpsilonGreedy(N, 0.5), {"alpha": 0.8, "period": 10, "epsilon": 0.1}),
        (lambda: DynUnc(N, 0.5, window=4, shuffle=False), {"window": 4}),
        (lambda: InfoBatch(N, 0.5), {"threshold": "mean"}),
        (lambda: RS2(N, 0.5, replacement=False), {"replacement": False}),
        (lambda: RandomSubset(N, 0.5), {}),
    ],
)
def test_the_settings_of_a_sampler_are_those_of_its_constructor(sampler: Any, settings: dict[str, Any]) -> None:
    made = sampler()
    assert made.config() == settings
    common = {"sampler": made.name, "num_samples": N, "prune_ratio": 0.5, "seed": made.seed, "shuffle": made.shuffle}
    common |= {"schedule.start": 0, "schedule.stop": None, "schedule.unit": "epoch"}
    # What 0.1.0 wrote into its states.
    assert json.loads(made.state_dict()["config"]) == common | {f"{made.name}.{k}": v for k, v in settings.items()}
