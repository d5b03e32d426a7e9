"""Batches that are pruned before a sample is loaded: what comes out, in which order, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import halfway
from halfway.samplers import InfoBatch, WithWeights
from halfway.selectors import Candidates, Selection, Selector

N = 103


def data(n: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 6, generator=generator), torch.arange(n) % 3)


def batches_of(source=N, batch_size=16, prune_ratio=0.5, **options) -> halfway.PrunedBatchSampler:
    source = data(source) if isinstance(source, int) else source
    return halfway.PrunedBatchSampler(source, batch_size, prune_ratio, **options)


def test_exactly_so_many_of_each_batch_and_of_a_partial_last_one() -> None:
    batches = batches_of(prune_ratio=0.3)
    found = [len(batch) for batch in batches]
    # As the blocker: N - round(p N), of 16 and of the last 7.
    assert found == [16 - round(0.3 * 16)] * 6 + [7 - round(0.3 * 7)]
    assert len(batches_of(prune_ratio=0.3)) == 7 == len(found)


def test_an_incomplete_last_batch_can_be_left_out() -> None:
    batches = batches_of(drop_last=True)
    assert [len(batch) for batch in batches] == [8] * 6
    assert len(batches) == 6


def test_samples_are_offered_in_the_order_of_the_sampler() -> None:
    batches = batches_of(SequentialSampler(data()), prune_ratio=0.0)
    assert [int(i) for batch in batches for i in batch] == list(range(N))


def test_a_data_set_is_shuffled_by_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        batches = batches_of(prune_ratio=0.0, seed=seed)
        batches.set_epoch(epoch)
        return [int(i) for batch in batches for i in batch]

    assert sorted(order(0, 0)) == list(range(N))
    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_random_retains_every_sample_equally_often() -> None:
    batches = batches_of(32, batch_size=8, prune_ratio=0.25)
    counts = torch.zeros(32)
    for epoch in range(600):
        batches.set_epoch(epoch)
        for batch in batches:
            counts[batch] += 1
    # Binomial(600, 0.75): standard deviation 10.6.
    assert (counts - 450).abs().max() < 4 * 10.6


def test_the_draw_of_a_batch_does_not_depend_on_where_the_others_were_drawn() -> None:
    whole = [list(map(int, batch)) for batch in batches_of()]
    batches = batches_of()
    batches.set_epoch(0, skip=3)
    assert len(batches) == 4
    assert [list(map(int, batch)) for batch in batches] == whole[3:]


def test_iterating_again_begins_the_next_epoch() -> None:
    by_itself, told = batches_of(), batches_of()
    for epoch in range(3):
        told.set_epoch(epoch)
        assert [list(b) for b in by_itself] == [list(b) for b in told]


def test_an_epoch_that_was_broken_off_begins_anew_with_the_same_batches() -> None:
    batches = batches_of()
    first = [list(batch) for batch, _ in zip(batches, range(3), strict=False)]
    assert [list(batch) for batch in batches][:3] == first


def test_outside_of_the_schedule_nothing_is_pruned() -> None:
    batches = batches_of(schedule=halfway.Schedule(1, 2))
    sizes = []
    for epoch in range(3):
        batches.set_epoch(epoch)
        sizes.append(sum(map(len, batches)))
    assert sizes[0] == sizes[2] == N
    assert sizes[1] < 0.6 * N
    assert batches.stats.pruned_steps == 7


def test_a_schedule_in_steps_counts_batches() -> None:
    batches = batches_of(96, schedule=halfway.Schedule(2, 4, unit="step"))
    assert [len(batch) for batch in batches] == [16, 16, 8, 8, 16, 16]


def test_stats_count_what_was_drawn() -> None:
    batches = batches_of(96)
    list(batches)
    stats = batches.stats
    assert (stats.steps, stats.pruned_steps, stats.samples_seen, stats.samples_retained) == (6, 6, 96, 48)
    assert stats.relative_flops == stats.effective_ratio == 0.5
    assert batches.last is not None
    assert len(batches.last.indices) == 8


def test_a_data_loader_loads_the_retained_samples_only() -> None:
    loaded: list[int] = []

    class Counting(TensorDataset):
        def __getitem__(self, i):
            loaded.append(int(i))
            return super().__getitem__(i)

    dataset = Counting(*data(96).tensors)
    batches = batches_of(dataset)
    for x, _y, ids in DataLoader(halfway.WithIds(dataset), batch_sampler=batches):
        assert torch.equal(x, dataset.tensors[0][ids])
    assert len(loaded) == 48


class Weighted(Selector):
    """Retains the first rows, with weights that tell the sample."""

    name = "weighted"
    wants_ids = "required"

    def select(self, candidates: Candidates, count: int) -> Selection:
        return Selection(torch.arange(count), weights=candidates.required_ids[:count] / 100)


def test_weights_travel_with_the_index() -> None:
    dataset = data(64)
    batches = batches_of(dataset, selector=Weighted())
    for _x, _y, ids, weights in DataLoader(WithWeights(dataset), batch_sampler=batches, num_workers=2):
        torch.testing.assert_close(weights, ids / 100)
        torch.testing.assert_close(batches.weights(ids), weights)


def test_where_a_sample_comes_twice_its_last_weight_counts_and_others_weigh_one() -> None:
    class Counting(Selector):
        name = "counting"

        def select(self, candidates: Candidates, count: int) -> Selection:
            ids = candidates.required_ids[:count]
            drawn.update((i, 2.0 + len(drawn) + 100 * drawn.get(i, 0)) for i in ids.tolist())
            return Selection(torch.arange(count), weights=torch.tensor([drawn[i] for i in ids.tolist()]))

    drawn: dict[int, float] = {}
    again = RandomSampler(data(12), replacement=True, num_samples=40, generator=torch.Generator().manual_seed(3))
    batches = batches_of(again, batch_size=8, selector=Counting())
    list(batches)
    asked = torch.arange(20, dtype=torch.int32)
    assert 0 < len(drawn) < 12
    assert batches.weights(asked).tolist() == [drawn.get(i, 1.0) for i in asked.tolist()]


def test_targets_go_to_a_selector_that_looks_at_classes() -> None:
    seen = []

    class Looks(Weighted):
        wants_targets = "optional"

        def select(self, candidates: Candidates, count: int) -> Selection:
            seen.append((candidates.ids, candidates.targets))
            return super().select(candidates, count)

    targets = torch.randint(5, (N,), generator=torch.Generator().manual_seed(0))
    list(batches_of(selector=Looks(), targets=targets.tolist()))
    for ids, found in seen:
        assert torch.equal(found, targets[ids])


@pytest.mark.parametrize(
    "source", [data(), RandomSampler(data()), DistributedSampler(data(), 2, 0)], ids=["data set", "sampler", "ranks"]
)
def test_targets_of_another_data_set_are_refused(source) -> None:
    targets = torch.zeros(N + 50, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"there are {N + 50} targets and {N} samples"):
        batches_of(source, selector="class_balanced", targets=targets)
    batches_of(source, selector="random", targets=targets)  # which does not look at them


def test_a_sampler_may_hold_something_else_than_the_data_set() -> None:
    class Part(SequentialSampler):
        """Of some ids, which it calls its source."""

        def __iter__(self):
            return iter(self.data_source)

    batches = batches_of(Part(range(20, 100)), selector="class_balanced", targets=torch.arange(N) % 3)
    assert {int(i) for batch in batches for i in batch} <= set(range(20, 100))


def test_an_id_without_a_target_is_an_error_that_names_it() -> None:
    targets = torch.zeros(50, dtype=torch.int64)
    source = SubsetRandomSampler(range(60))  # which does not say what it samples from
    with pytest.raises(ValueError, match=r"there is the id 5\d, but targets= holds the classes of 50 samples"):
        list(batches_of(source, selector="class_balanced", targets=targets))


def test_every_rank_of_a_distributed_sampler_draws_from_its_own_samples() -> None:
    dataset = data(96)
    shares = []
    for rank in range(2):
        batches = batches_of(DistributedSampler(dataset, 2, rank, seed=3), prune_ratio=0.0)
        batches.set_epoch(4)
        shares.append({int(i) for batch in batches for i in batch})
    assert not shares[0] & shares[1]
    assert len(shares[0] | shares[1]) == 96
    other = DistributedSampler(dataset, 2, 0, seed=3)
    other.set_epoch(4)
    batches = batches_of(DistributedSampler(dataset, 2, 0, seed=3), prune_ratio=0.0)
    batches.set_epoch(4)
    assert [int(i) for batch in batches for i in batch] == list(other)


# ------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("selector", ["density", "balanced", "loss", "divbs"])
def test_a_selector_that_looks_at_the_model_is_refused_and_the_blocker_named(selector: str) -> None:
    with pytest.raises(ValueError, match=r"halfway\.ForwardBlocker.*'random'"):
        batches_of(selector=selector)


def test_a_sampler_that_prunes_itself_is_refused() -> None:
    with pytest.raises(TypeError, match="prunes before each epoch itself"):
        batches_of(InfoBatch(data(), 0.5))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"prune_ratio": 1.0}, ValueError, "prune_ratio"),
        ({"lag": 0}, ValueError, "lag must be at least 1"),
        ({"source": iter(range(3))}, TypeError, "Sampler or a map-style data set"),
        ({"targets": torch.zeros(3, 2)}, ValueError, "one class per sample"),
        ({"selector": "no_such"}, ValueError, "unknown selector"),
    ],
)
def test_bad_input_is_an_error_at_construction(options, error, message) -> None:
    with pytest.raises(error, match=message):
        batches_of(**options)


def test_the_ratio_has_no_default_so_that_nothing_makes_a_sampler_without_it() -> None:
    with pytest.raises(TypeError, match="prune_ratio"):
        halfway.PrunedBatchSampler(data(), 16)  # type: ignore[call-arg]


def test_accelerate_finds_no_batch_size_to_compare_with() -> None:
    assert not hasattr(batches_of(), "batch_size")


def test_an_iterator_of_an_epoch_that_is_over_says_so() -> None:
    batches = batches_of()
    iterator = iter(batches)
    next(iterator)
    batches.set_epoch(1)
    with pytest.raises(RuntimeError, match="another one has begun"):
        next(iterator)


def test_skipping_more_than_there_is_is_an_error() -> None:
    with pytest.raises(ValueError, match="more than the 7 batches"):
        batches_of().set_epoch(0, skip=8)


# --------------------------------------------------------------------- going on later


def test_a_random_sampler_of_the_global_generator_goes_on_in_its_order() -> None:
    torch.manual_seed(0)
    batches = batches_of(RandomSampler(data()))
    iterator = iter(batches)
    done = [next(iterator) for _ in range(3)]
    state = copy.deepcopy(batches.state_dict())
    rest = list(iterator)
    resumed = batches_of(RandomSampler(data()))
    resumed.load_state_dict(state)
    resumed.set_epoch(0, skip=3)
    assert list(resumed) == rest
    assert done


def test_the_state_loads_with_weights_only(tmp_path) -> None:
    batches = batches_of(selector="rotate", lag=1)
    list(batches)
    torch.save(batches.state_dict(), tmp_path / "state.pt")
    other = batches_of(selector="rotate", lag=1)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for epoch in (1, 2):
        batches.set_epoch(epoch)
        other.set_epoch(epoch)
        assert list(batches) == list(other)
    assert batches.stats == other.stats


@pytest.mark.parametrize("change", [{"seed": 1}, {"prune_ratio": 0.4}, {"selector": "rotate"}, {"batch_size": 8}])
def test_the_state_of_another_configuration_is_refused(change) -> None:
    state = batches_of().state_dict()
    with pytest.raises(ValueError, match="another configuration"):
        batches_of(**change).load_state_dict(state)


def test_what_is_no_state_is_refused_and_nothing_taken_over() -> None:
    batches = batches_of(selector="rotate")
    list(batches)
    before = copy.deepcopy(batches.state_dict())
    with pytest.raises(ValueError, match="not the state_dict"):
        batches.load_state_dict({"version": 1})
    broken = copy.deepcopy(before)
    broken["epoch"]["retained"] = torch.zeros(3, dtype=torch.bool)
    with pytest.raises(ValueError, match="do not belong together"):
        batches.load_state_dict(broken)
    after = batches.state_dict()
    assert torch.equal(before["epoch"]["retained"], after["epoch"]["retained"])
    assert torch.equal(before["selector"]["waited"], after["selector"]["waited"])
