"""Samplers: each method against a slow reference, and what all of them promise: order, weights, loaders, resuming."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import statistics
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from halfway import Schedule, WithIds
from halfway.samplers import (
    RS2,
    SAMPLERS,
    UCB,
    DynUnc,
    EpsilonGreedy,
    Index,
    InfoBatch,
    RandomSubset,
    WithWeights,
    make,
)
from halfway.seeds import seed_of

N = 30
# Most trainings here are shorter than its window; the tests of the warning ask for it.
pytestmark = pytest.mark.filterwarnings("ignore:dyn_unc")

EVERY = [*((name, {}) for name in sorted(SAMPLERS)), ("rs2", {"replacement": False}), ("infobatch", {"threshold": 0.6})]


def loss_table(epochs: int, samples: int = N, seed: int = 0) -> list[list[float]]:
    """A loss for every visit, such that no two are equal."""
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.rand(epochs, samples, generator=generator, dtype=torch.float64)).tolist()


def feed(sampler: Any, losses: list[float], ids: list[int] | None = None, batch: int = 7) -> list[int]:
    """An epoch of training: the ids it met, in batches, each told to the sampler."""
    ids = [int(i) for i in sampler] if ids is None else ids
    for first in range(0, len(ids), batch):
        part = ids[first : first + batch]
        sampler.observe(torch.tensor(part), torch.tensor([losses[i] for i in part]))
    return ids


def assert_highest(retained: list[int], scores: dict[int, float], count: int, samples: int = N) -> None:
    """Exactly `count`: first those without a score, then the highest."""
    unknown = set(range(samples)) - set(scores)
    assert len(retained) == count == len(set(retained))
    if len(unknown) >= count:
        assert set(retained) <= unknown
        return
    ranking = sorted(scores, key=lambda i: -scores[i])
    assert set(retained) == unknown | set(ranking[: count - len(unknown)])


# --- what all samplers have in common -------------------------------------------------------------


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


# --- InfoBatch ------------------------------------------------------------------------------------


def candidates(losses: dict[int, float], threshold: float | str, ratio: float) -> set[int]:
    if threshold == "mean":
        mean = sum(losses.values()) / len(losses)
        return {i for i, loss in losses.items() if loss < mean}
    q = math.sqrt(ratio) if threshold == "match" else float(threshold)
    count = next(c for c in range(len(losses) + 1) if c / len(losses) >= q - 1e-12)
    return set(sorted(losses, key=lambda i: losses[i])[:count])


@pytest.mark.parametrize("threshold", ["mean", 0.25, 0.95, 1.0, "match"])
def test_infobatch_prunes_candidates_only_and_re_weights_those_that_stay(threshold: Any) -> None:
    ratio, epochs = 0.4, 6
    sampler, table = InfoBatch(N, ratio, threshold=threshold, seed=3), loss_table(epochs)
    known: dict[int, float] = {}
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        retained = set(sampler.retained.tolist())
        expected = candidates(known, threshold, ratio) if known else set()
        assert set(range(N)) - retained <= expected
        rate = 0.4 * len(known) / len(expected) if threshold == "match" and expected else ratio
        for i in sampler:
            assert i.weight == pytest.approx(1 / (1 - rate) if i in expected else 1.0)
        # Of the first epoch only a half is told, so that what is known grows.
        met = feed(sampler, table[epoch], None if epoch else list(range(0, N, 2)))
        known |= {i: table[epoch][i] for i in met}
    assert 0 < sampler.effective_ratio < ratio


def test_samples_nobody_has_seen_are_never_candidates() -> None:
    sampler = InfoBatch(10, 0.9, threshold=1.0)
    sampler.set_epoch(0)
    assert sampler.last_ratio == 0
    sampler.observe(torch.arange(5), torch.zeros(5))
    sampler.observe(torch.tensor([4]), torch.tensor([float("nan")]))
    for epoch in range(1, 20):
        sampler.set_epoch(epoch)
        assert set(range(4, 10)) <= set(sampler.retained.tolist())
        assert torch.equal(sampler.weights(torch.arange(4, 10)), torch.ones(6))


@pytest.mark.parametrize("threshold", ["mean", 0.95, "match"])
def test_infobatch_gradients_are_unbiased_and_its_ratio_is_as_documented(threshold: Any) -> None:
    samples, ratio, decisions = 40, 0.5, 1500
    losses = [x * x for x in loss_table(1, samples)[0]]
    gradients = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sampler = InfoBatch(samples, ratio, threshold=threshold)
    sampler.observe(torch.arange(samples), torch.tensor(losses))
    means, ratios = [], []
    for epoch in range(decisions):
        sampler.set_epoch(epoch)
        ids = sampler.retained
        means.append((sampler.weights(ids).double().unsqueeze(1) * gradients[ids]).sum(0) / samples)
        ratios.append(sampler.last_ratio)
    among = candidates(dict(enumerate(losses)), threshold, ratio)
    g = gradients[sorted(among)]
    rate = ratio * samples / len(among) if threshold == "match" else ratio
    variance = g.square().sum(0) * rate / (1 - rate) / samples**2
    if threshold == "match":  # drawn without replacement from the candidates: sampling theory's (n - s) / (n s) S^2
        n, s = len(g), len(g) * (1 - rate)
        variance = g.var(0) * (n - s) / (n * s) * (n / samples) ** 2
    estimates = torch.stack(means)
    assert ((estimates.mean(0) - gradients.mean(0)).abs() < 4 * (variance / decisions).sqrt()).all()
    assert torch.allclose(estimates.var(0), variance, rtol=0.2)
    expected_ratio = {"mean": ratio * len(among) / samples, 0.95: 0.95 * ratio, "match": ratio}[threshold]
    assert statistics.mean(ratios) == pytest.approx(expected_ratio, abs=0.008)
    if threshold == "match":
        assert set(ratios) == {ratio}


def test_the_mean_threshold_prunes_nobody_when_all_losses_are_equal() -> None:
    for loss in (1.0, 0.1, 0.3, 0.7, 2.3):
        sampler = InfoBatch(N, 0.9)
        sampler.observe(torch.arange(N), torch.full((N,), loss))
        sampler.set_epoch(0)
        assert sampler.last_ratio == 0


# --- UCB, epsilon-greedy, Dyn-Unc -----------------------------------------------------------------


@pytest.mark.parametrize(("cls", "extra"), [(UCB, {"c": 2.0}), (EpsilonGreedy, {"epsilon": 0.25})])
@pytest.mark.parametrize("start", [0, 2])
def test_moving_averages_decide_every_few_epochs_as_the_reference_does(cls: Any, extra: Any, start: int) -> None:
    alpha, period, epochs, count = 0.7, 3, 14, 18
    sampler = cls(N, 0.4, alpha=alpha, period=period, schedule=Schedule(start), seed=1, **extra)
    table, mean, variance = loss_table(epochs), {}, {}
    before: list[int] = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        retained = sampler.retained.tolist()
        if epoch < start:
            assert len(retained) == N
        elif (epoch - start) % period:
            assert retained == before
        elif cls is UCB:
            assert_highest(retained, {i: mean[i] + 2.0 * variance[i] for i in mean}, count)
        else:
            greedy, unknown = count - round(0.25 * count), set(range(N)) - set(mean)
            best = set(sorted(mean, key=lambda i: -mean[i])[: max(0, greedy - len(unknown))])
            assert len(retained) == count
            assert best <= set(retained)
            assert len(unknown) > greedy or unknown <= set(retained)
        before = retained
        for i in feed(sampler, table[epoch]):
            loss = table[epoch][i]
            if i in mean:
                difference = loss - mean[i]
                variance[i] = (1 - alpha) * variance[i] + alpha * difference**2
                mean[i] = alpha * loss + (1 - alpha) * mean[i]
            else:
                mean[i], variance[i] = loss, 0.0
    assert len(mean) == N, "samples that were never seen come first, so all are seen before long"


def test_going_back_into_the_window_chooses_anew_instead_of_going_on_with_everybody() -> None:
    sampler = UCB(N, 0.5, schedule=Schedule(0, 3))
    sampler.observe(torch.arange(N), torch.arange(float(N)))
    for epoch, count in ((2, 15), (3, N), (2, 15)):
        sampler.set_epoch(epoch)
        assert len(sampler) == count


@pytest.mark.parametrize("cls", [UCB, EpsilonGreedy, DynUnc, RS2])
def test_equal_samples_are_retained_at_random(cls: Any) -> None:
    times = torch.zeros(10)
    for seed in range(400):
        sampler = cls(10, 0.5, seed=seed, **({"replacement": False} if cls is RS2 else {}))
        sampler.observe(torch.arange(0, 10), torch.ones(10))
        sampler.set_epoch(0)
        times[sampler.retained] += 1
    assert (times - 200).abs().max() < 5 * 10


def test_epsilon_greedy_draws_the_others_evenly() -> None:
    sampler, times = EpsilonGreedy(20, 0.5, epsilon=0.4, period=1), [0] * 20
    sampler.observe(torch.arange(20), torch.arange(20.0))
    for epoch in range(2000):
        sampler.set_epoch(epoch)
        for i in sampler.retained.tolist():
            times[i] += 1
    assert times[14:] == [2000] * 6
    # 4 of the other 14 each time: binomial, 571 with a standard deviation of 20.
    assert all(abs(t - 2000 * 4 / 14) < 5 * 20.2 for t in times[:14])


def test_dynamic_uncertainty_is_the_mean_deviation_over_sliding_windows() -> None:
    window, epochs, count = 3, 16, 18
    sampler, table = DynUnc(N, 0.4, window=window, seed=2), loss_table(epochs, seed=4)
    history: dict[int, list[float]] = {i: [] for i in range(N)}
    informed = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        scores = {}
        for i, p in history.items():
            if len(p) >= window:
                windows = [p[last - window : last] for last in range(window, len(p) + 1)]
                scores[i] = statistics.mean(statistics.stdev(w) for w in windows)
        assert_highest(sampler.retained.tolist(), scores, count)
        assert all(sampler.memory.values[i, 1] == pytest.approx(score, rel=1e-4) for i, score in scores.items())
        informed += len(scores) > N - count
        for i in feed(sampler, table[epoch]):
            history[i].append(math.exp(-table[epoch][i]))
    assert informed > 5


def test_a_window_that_cannot_fill_is_said_when_the_sampler_is_made() -> None:
    # The last decision is made before epoch 13: one visit in epoch 0, and half of the twelve epochs from 1 to 12.
    with pytest.warns(UserWarning, match=r"visited about 7 times before the last decision, in epoch 13.* 10 visits"):
        sampler = DynUnc(N, 0.5, schedule=Schedule(1, 14))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.set_epoch(1)  # once is enough
        DynUnc(N, 0.5, schedule=Schedule(1, 14), window=7)
        DynUnc(N, 0.5, schedule=Schedule(10, 14))
        DynUnc(N, 0.0, schedule=Schedule(1, 14))
        unknown = DynUnc(N, 0.5, schedule=Schedule(1))
    with pytest.warns(UserWarning, match="visited about 8 times"):
        unknown.foresee(16)


def test_an_epoch_that_is_drawn_without_any_score_is_said_once() -> None:
    sampler = DynUnc(N, 0.5, window=3)
    with pytest.warns(
        UserWarning, match=r"in epoch 0 no sample has the 3 visits .* window=.* Schedule\(start=window\)"
    ):
        sampler.set_epoch(0)
    late = DynUnc(N, 0.5, window=2, schedule=Schedule(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.observe(torch.arange(N), torch.rand(N))
        sampler.set_epoch(1)
        for epoch in range(4):
            late.set_epoch(epoch)
            late.observe(torch.arange(N), torch.rand(N))


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


# --- random ---------------------------------------------------------------------------------------


def test_rs2_without_replacement_uses_all_samples_before_it_repeats_any() -> None:
    sampler, used = RS2(10, 0.3, replacement=False), [0] * 10
    for epoch in range(30):
        sampler.set_epoch(epoch)
        assert len(set(sampler)) == 7
        for i in sampler:
            used[i] += 1
        assert max(used) - min(used) <= 1
    assert used == [21] * 10


def test_rs2_with_replacement_draws_every_epoch_anew_and_evenly() -> None:
    sampler, used, subsets = RS2(10, 0.5), [0] * 10, set()
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        subsets.add(tuple(sampler.retained.tolist()))
        for i in sampler:
            used[i] += 1
    assert len(subsets) > 200  # of 252
    assert all(abs(u - 500) < 5 * 15.9 for u in used)


def test_a_random_subset_never_changes() -> None:
    subsets = []
    for seed in (0, 1):
        sampler = RandomSubset(N, 0.3, seed=seed)
        found = set()
        for epoch in (0, 1, 7, 1):
            sampler.set_epoch(epoch)
            found.add(tuple(sampler.retained.tolist()))
        assert len(found) == 1
        subsets.append(found.pop())
        assert len(subsets[-1]) == 21
    assert subsets[0] != subsets[1]


# --- data sets and loaders ------------------------------------------------------------------------


class Squares(Dataset):
    def __init__(self, kind: str = "tuple") -> None:
        self.kind = kind

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        x = torch.tensor(float(index) ** 2)
        return {"tuple": (x, -index), "mapping": {"x": x}, "tensor": x}[self.kind]


def test_ids_and_weights_come_right_through_persistent_workers_and_losses_change_the_next_epoch() -> None:
    sampler = InfoBatch(Squares(), 0.5, threshold=0.5)
    loader = DataLoader(WithWeights(Squares()), batch_size=4, sampler=sampler, num_workers=2, persistent_workers=True)
    # Losses grow with the id and then fall with it: the candidates are the lower half, then the upper one.
    for epoch, (sign, low) in enumerate([(1.0, set()), (-1.0, set(range(15))), (1.0, set(range(15, N)))]):
        sampler.set_epoch(epoch)
        expected, met, pruned = list(sampler), [], set(range(N)) - set(sampler.retained.tolist())
        assert len(loader) == math.ceil(len(expected) / 4)
        for x, y, ids, weights in loader:
            assert torch.equal(x, ids.float() ** 2)
            assert torch.equal(y, -ids)
            assert weights.dtype == torch.float32
            assert torch.equal(weights, sampler.weights(ids))
            assert weights.tolist() == [2.0 if i in low else 1.0 for i in ids.tolist()]
            sampler.observe(ids, sign * ids.float() + 100)
            met += ids.tolist()
        assert met == expected
        assert pruned <= low
        assert bool(pruned) == bool(low)
        if epoch == 1:  # nobody has seen the pruned ones since; what is known of them would hide the new half
            sampler.observe(torch.tensor(sorted(pruned)), 100.0 - torch.tensor(sorted(pruned)))


def test_data_sets_of_any_shape_get_ids_and_weights() -> None:
    index = pickle.loads(pickle.dumps(Index(3, 2.5)))
    assert (index, index.weight, type(index)) == (3, 2.5, Index)
    assert copy.deepcopy(index).weight == 2.5
    assert WithWeights(Squares("tuple"))[index] == (9, -3, 3, 2.5)
    assert WithWeights(Squares("mapping"))[index] == {"x": 9, "ids": 3, "weights": 2.5}
    assert WithWeights(Squares("tensor"))[index] == (9, 3, 2.5)
    assert WithWeights(Squares("tensor"))[3] == (9, 3, 1.0)
    assert WithWeights(Subset(Squares("tensor"), [5, 6, 7, 8]))[index] == (64, 3, 2.5)
    assert len(WithWeights(Squares())) == N
    # Without it an index is a plain int, also for a loader and WithIds.
    (x, ids) = next(iter(DataLoader(WithIds(Squares("tensor")), sampler=[index, 4], batch_size=2)))
    assert (x.tolist(), ids.tolist()) == ([9, 16], [3, 4])


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


# --- resuming -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_a_run_that_stops_within_an_epoch_goes_on_with_the_rest_of_it(name: str, options: dict[str, Any]) -> None:
    epochs, stop_at, done, table = 6, 3, 5, loss_table(6)
    options = {**options, "period": 2} if name in ("ucb", "epsilon_greedy") else options
    options = {**options, "window": 2} if name == "dyn_unc" else options

    def new() -> Any:
        return make(name, N, 0.4, schedule=Schedule(1), seed=4, **options)

    whole, file, seen = new(), io.BytesIO(), []
    for epoch in range(epochs):
        whole.set_epoch(epoch)
        order = list(whole)
        seen.append([(int(i), i.weight) for i in order])
        if epoch == stop_at:
            feed(whole, table[epoch], order[:done])
            torch.save(whole.state_dict(), file)
            feed(whole, table[epoch], order[done:])
        else:
            feed(whole, table[epoch])

    file.seek(0)
    resumed = new()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for epoch in range(stop_at, epochs):
        skip = done if epoch == stop_at else 0
        resumed.set_epoch(epoch, skip=skip)
        assert [(int(i), i.weight) for i in resumed] == seen[epoch][skip:]
        assert len(resumed) == len(seen[epoch]) - skip
        feed(resumed, table[epoch])
    assert resumed.effective_ratio == whole.effective_ratio
    for ours, theirs in zip(leaves(resumed.state_dict()), leaves(whole.state_dict()), strict=True):
        assert torch.equal(ours.nan_to_num(-1), theirs.nan_to_num(-1)) if torch.is_tensor(ours) else ours == theirs


def leaves(state: dict[str, Any]) -> list[Any]:
    return [
        leaf for key in sorted(state) for leaf in (leaves(state[key]) if isinstance(state[key], dict) else [state[key]])
    ]


def test_a_state_does_not_change_any_more_and_has_the_same_shapes_before_and_after() -> None:
    sampler = InfoBatch(N, 0.5)
    fresh = sampler.state_dict()
    sampler.set_epoch(0)
    state = sampler.state_dict()
    before = copy.deepcopy(state)
    sampler.observe(torch.arange(N), torch.rand(N))
    sampler.set_epoch(1)
    for a, b, c in zip(leaves(state), leaves(before), leaves(fresh), strict=True):
        assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1)) if torch.is_tensor(a) else a == b
        assert not torch.is_tensor(a) or a.shape == c.shape


def test_the_state_of_another_configuration_is_refused_with_the_differences() -> None:
    state = InfoBatch(N, 0.5, seed=1).state_dict()
    with pytest.raises(ValueError, match=r"infobatch.threshold: 'mean' in the state, 0.95 here; seed: 1 .* 0 here"):
        InfoBatch(N, 0.5, threshold=0.95).load_state_dict(state)
    with pytest.raises(ValueError, match=r"sampler: 'infobatch' in the state, 'rs2' here"):
        RS2(N, 0.5, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match=r"schedule.start: 0 in the state, 2 here"):
        InfoBatch(N, 0.5, seed=1, schedule=Schedule(2)).load_state_dict(state)
    sampler = InfoBatch(N, 0.5, seed=1)
    for broken in ({}, {**state, "version": 9}, {**state, "config": "?"}, {**state, "retained": torch.ones(3)}):
        with pytest.raises(ValueError, match=r"not the state_dict|version 9|shape \(30,\)"):
            sampler.load_state_dict(broken)


# --- being told what is wrong ---------------------------------------------------------------------


def test_a_sampler_that_is_never_fed_warns_once_with_the_line_to_add() -> None:
    sampler = UCB(N, 0.5, schedule=Schedule(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.set_epoch(0)
        sampler.set_epoch(1)
        with pytest.raises(UserWarning, match=r"add `sampler.observe\(ids, losses\)` to the loop"):
            sampler.set_epoch(2)
        sampler.set_epoch(2)
        sampler.set_epoch(3)
        fed, dull = UCB(N, 0.5), RS2(N, 0.5)
        fed.set_epoch(0)
        fed.observe(torch.arange(N), torch.rand(N))
        again = UCB(N, 0.5)
        again.load_state_dict(fed.state_dict())
        for quiet in (fed, dull, again):
            for epoch in range(3):
                quiet.set_epoch(epoch)


def decided(**options: Any) -> Any:
    sampler = InfoBatch(N, 0.5, **options)
    sampler.set_epoch(0)
    return sampler


IDS = torch.arange(3)
MISTAKES = {
    "ratio": (lambda: RS2(N, 1.0), ValueError, r"in \[0, 1\), got 1.0"),
    "steps": (lambda: RS2(N, 0.5, schedule=Schedule(unit="step")), ValueError, r"use Schedule\(..., unit='epoch'\)"),
    "empty": (lambda: RS2([], 0.5), ValueError, "the data set is empty"),
    "iterable": (lambda: RS2(iter([1]), 0.5), TypeError, "a data set with a length, or its length"),
    "timeout": (lambda: RS2(N, 0.5, timeout=0), ValueError, "timeout"),
    "name": (lambda: make("infobach", N, 0.5), ValueError, r"unknown sampler 'infobach'; choose one of \['dyn_unc'"),
    "threshold": (lambda: InfoBatch(N, 0.5, threshold=1.5), ValueError, "'mean', 'match' or a quantile"),
    "median": (lambda: InfoBatch(N, 0.5, threshold="median"), ValueError, "'mean', 'match' or a quantile"),
    "alpha": (lambda: UCB(N, 0.5, alpha=0), ValueError, r"alpha .* in \(0, 1\], got 0"),
    "period": (lambda: EpsilonGreedy(N, 0.5, period=0), ValueError, "period is in epochs"),
    "c": (lambda: UCB(N, 0.5, c=-1), ValueError, "c is the weight of the variance"),
    "epsilon": (lambda: EpsilonGreedy(N, 0.5, epsilon=2), ValueError, r"in \[0, 1\], got 2"),
    "window": (lambda: DynUnc(N, 0.5, window=1), ValueError, "from 2 on, got 1"),
    "no epoch": (lambda: list(RS2(N, 0.5)), RuntimeError, r"call sampler.set_epoch\(epoch\) before each epoch"),
    "no length": (lambda: len(RS2(N, 0.5)), RuntimeError, "set_epoch"),
    "no weights": (lambda: RS2(N, 0.5).weights(IDS), RuntimeError, "set_epoch"),
    "epoch": (lambda: RS2(N, 0.5).set_epoch(-1), ValueError, "epoch must be at least 0"),
    "half": (lambda: RS2(N, 0.5).set_epoch(0.5), TypeError, "epoch must be a whole number, got 0.5"),
    "skip": (lambda: RS2(N, 0.5).set_epoch(0, skip=16), ValueError, "skip=16 is more than the 15 samples"),
    "mean loss": (lambda: decided().observe(IDS, torch.tensor(1.0)), ValueError, "compute them with reduction='none'"),
    "lengths": (lambda: decided().observe(IDS, torch.ones(4)), ValueError, r"shape \(3,\), got .* \(4,\)"),
    "no tensor": (lambda: decided().observe([1], torch.ones(1)), ValueError, "ids must be a tensor .* got a list"),
    "float ids": (lambda: decided().observe(torch.ones(3), torch.ones(3)), ValueError, "whole numbers"),
    "range": (lambda: decided().observe(IDS + N, torch.ones(3)), ValueError, "from 0 to 29, .* got 30 to 32"),
    "dull range": (lambda: RS2(N, 0.5).observe(IDS + N, torch.ones(3)), ValueError, "from 0 to 29"),
    "weights": (lambda: decided().weights(IDS - 1), ValueError, "got -1 to 1"),
    "stream": (lambda: WithWeights(iter([1])), TypeError, "map-style data set"),
    "twice": (lambda: WithWeights(WithIds(Squares())), TypeError, "yields ids itself"),
    "taken": (lambda: WithWeights([{"weights": 1}])[0], ValueError, "already yields an entry 'weights'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_with_their_fix(mistake: str) -> None:
    call, error, words = MISTAKES[mistake]
    with pytest.raises(error, match=words):
        call()
