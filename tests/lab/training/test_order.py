"""Batches as a function of seed and epoch: each sample once, ranks share, and a rest is the rest."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from halfway.lab.data import TrainSet
from halfway.lab.training.order import BatchOrder
from halfway.lab.training.retention import Retention
from halfway.seeds import seed_of


def ids(order: BatchOrder, epoch: int, first: int = 0) -> list[list[int]]:
    return [batch.tolist() for batch, _ in order.epoch(epoch, first)]


@pytest.mark.parametrize(("samples", "batch_size"), [(24, 6), (25, 6), (29, 6), (7, 7), (5, 1)])
def test_an_epoch_has_every_sample_at_most_once_and_drops_less_than_a_batch(samples: int, batch_size: int) -> None:
    order = BatchOrder(samples, batch_size, seed=3)
    for epoch in range(5):
        batches = ids(order, epoch)
        assert {len(batch) for batch in batches} == {batch_size}
        flat = [i for batch in batches for i in batch]
        assert len(set(flat)) == len(flat)
        assert set(flat) <= set(range(samples))
        assert 0 <= samples - len(flat) < batch_size
        assert len(batches) == order.per_epoch


def test_which_samples_are_dropped_changes() -> None:
    order = BatchOrder(11, 4, seed=0)
    dropped: Counter[int] = Counter()
    for epoch in range(110):
        dropped.update(set(range(11)).difference(*ids(order, epoch)))
    assert set(dropped) == set(range(11)), "over time everybody is seen"
    assert max(dropped.values()) < 2 * 30, "each is left out 30 times on average"


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_ranks_part_each_batch_of_a_single_process_among_them(ranks: int) -> None:
    alone = ids(BatchOrder(40, 12, seed=5), 2)
    shares = [ids(BatchOrder(40, 12, 5, rank, ranks), 2) for rank in range(ranks)]
    for b, batch in enumerate(alone):
        parts = [share[b] for share in shares]
        assert {len(part) for part in parts} == {12 // ranks}
        assert sorted(i for part in parts for i in part) == sorted(batch)


def test_the_rest_of_an_epoch_is_the_same_as_in_the_whole() -> None:
    order = BatchOrder(50, 8, seed=1, rank=1, ranks=2)
    whole = order.epoch(3)
    for first in range(len(whole) + 1):
        rest = order.epoch(3, first)
        assert [seed for _, seed in rest] == [seed for _, seed in whole[first:]]
        assert ids(order, 3, first) == [batch.tolist() for batch, _ in whole[first:]]


def test_seeds_of_augmentation_differ_between_seeds_epochs_batches_and_ranks() -> None:
    seeds = [
        seed
        for run in range(4)
        for rank in range(3)
        for epoch in range(6)
        for _, seed in BatchOrder(60, 6, run, rank, 3).epoch(epoch)
    ]
    assert len(set(seeds)) == len(seeds) == 4 * 3 * 6 * 10


def test_orders_differ_between_seeds_and_epochs_and_nothing_else() -> None:
    orders = [ids(BatchOrder(30, 10, seed), epoch) for seed in range(5) for epoch in range(5)]
    assert all(orders[i] != orders[j] for i in range(len(orders)) for j in range(i))
    torch.rand(3)
    before = torch.random.get_rng_state()
    again = BatchOrder(30, 10, 2)
    again.epoch(4)
    assert ids(again, 1) == orders[2 * 5 + 1]
    assert torch.equal(before, torch.random.get_rng_state()), "the global generator is not touched"


def test_seeds_fit_a_generator_and_neighbours_are_far_apart() -> None:
    seeds = sorted(seed_of(a, b) for a in range(30) for b in range(30))
    assert len(set(seeds)) == 900
    assert seeds[0] >= 0
    assert seeds[-1] < 2**63
    # 900 points spread evenly at random: none of 30 equal parts of the range holds none, or thrice its share.
    parts = Counter(seed * 30 // 2**63 for seed in seeds)
    assert len(parts) == 30
    assert max(parts.values()) < 90
    assert seed_of(1, 2) != seed_of(2, 1)
    torch.Generator().manual_seed(seeds[-1])


def test_impossible_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size=11 is more than the 10 training images; make it smaller"):
        BatchOrder(10, 11, 0)
    with pytest.raises(ValueError, match="batch_size=10 is over all ranks and must be a multiple of their number, 4"):
        BatchOrder(100, 10, 0, rank=0, ranks=4)


# ---------------------------------------------------------------- who stayed


class Labelled(TrainSet):
    """Samples 0..9, whose class is 0 if even, else 1; or of unknown classes."""

    def __init__(self, known: bool = True) -> None:
        self.classes = ["even", "odd"]
        self.known = known

    def __len__(self) -> int:
        return 10

    def per_class(self, values: Tensor) -> Tensor | None:
        return torch.stack([values[::2].sum(), values[1::2].sum()]) if self.known else None

    batches = picture = label = None  # type: ignore[assignment]


def test_retention_counts_offers_and_stays_by_sample_and_by_class_and_round() -> None:
    random = torch.Generator().manual_seed(0)
    counts = Retention(Labelled(), torch.device("cpu"))
    offered, stayed = Counter[int](), Counter[int]()
    by_round = []
    for _ in range(3):
        classes = [[0, 0], [0, 0]]
        for _ in range(4):
            batch = torch.randperm(10, generator=random)[:6]
            rows = torch.randperm(6, generator=random)[:2].sort().values
            counts.note(batch, rows)
            for row, sample in enumerate(batch.tolist()):
                offered[sample] += 1
                classes[0][sample % 2] += 1
                if row in rows.tolist():
                    stayed[sample] += 1
                    classes[1][sample % 2] += 1
        counts.end_round()
        by_round.append(classes)
    assert counts.offered.tolist() == [offered[i] for i in range(10)]
    assert counts.retained.tolist() == [stayed[i] for i in range(10)]
    assert [t.tolist() for t in counts.class_offered] == [r[0] for r in by_round]
    assert [t.tolist() for t in counts.class_retained] == [r[1] for r in by_round]


def test_retention_goes_on_from_a_checkpoint_within_a_round() -> None:
    batches = [(torch.tensor([1, 2, 3]), torch.tensor([0])), (torch.tensor([3, 4, 5]), torch.tensor([0, 2]))]
    whole, first, second = (Retention(Labelled(), torch.device("cpu")) for _ in range(3))
    for batch in batches:
        whole.note(*batch)
    whole.end_round()
    first.note(*batches[0])
    second.load_state_dict(first.state_dict())
    second.note(*batches[1])
    second.end_round()
    assert second.offered.tolist() == whole.offered.tolist() == [0, 1, 1, 2, 1, 1, 0, 0, 0, 0]
    assert second.retained.tolist() == whole.retained.tolist() == [0, 1, 0, 1, 0, 1, 0, 0, 0, 0]
    assert torch.equal(second.class_retained[0], whole.class_retained[0])


def test_where_classes_are_unknown_only_samples_are_counted() -> None:
    counts = Retention(Labelled(known=False), torch.device("cpu"))
    counts.note(torch.tensor([4, 7]), torch.tensor([1]))
    counts.end_round()
    assert counts.class_offered == counts.class_retained == []
    assert counts.offered.sum() == 2
