"""Drawing without replacement: probabilities that are met, numbers that are exact."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from halfway.selectors.tools.draw import gumbel, inclusion_probabilities, systematic
from tests.helpers.draws import generator, within


def skewed(size, spread, seed=0):
    """Log-normal weights."""
    return (spread * torch.randn(size, generator=generator(seed), dtype=torch.float64)).exp()


def capped(weights, count):
    """The slow way: whoever would exceed 1 gets 1, one at a time, and the others share what is left."""
    certain: set[int] = set()
    while True:
        rest = math.fsum(w for i, w in enumerate(weights) if i not in certain)
        found = {i: w * (count - len(certain)) / rest for i, w in enumerate(weights) if i not in certain}
        largest = max(found, key=found.__getitem__)
        if found[largest] <= 1:
            return [1.0 if i in certain else found[i] for i in range(len(weights))]
        certain.add(largest)


# --------------------------------------------------------------------------------- inclusion probabilities


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("count", [1, 5, 12, 19])
def test_probabilities_are_proportional_to_the_weights_and_capped_at_one(spread, count):
    weights = skewed(20, spread, seed=count)
    found = inclusion_probabilities(weights.float(), count)
    assert found.dtype == torch.float64
    assert float(found.sum()) == pytest.approx(count, abs=1e-9)
    assert found.tolist() == pytest.approx(capped(weights.float().tolist(), count), abs=1e-9)
    assert (found > 0).all()
    assert (found <= 1).all()


def test_samples_without_weight_can_be_drawn_all_the_same():
    found = inclusion_probabilities(torch.tensor([0.0, 1.0, 1.0, 1.0]), 2)
    assert 1e-7 < float(found[0]) < 1e-5
    assert torch.allclose(inclusion_probabilities(torch.zeros(8), 3), torch.full((8,), 3 / 8, dtype=torch.float64))


@pytest.mark.parametrize("count", [108, 115])
def test_weights_of_very_different_sizes_are_capped_to_the_end(count):
    for seed in range(40):
        weights = skewed(120, 5.0, seed)
        found = inclusion_probabilities(weights, count)
        assert float(found.sum()) == pytest.approx(count, abs=1e-6)
        assert len(set(systematic(found, count, generator(seed)).tolist())) == count


# --------------------------------------------------------------------------------------------- systematic


def test_exactly_count_distinct_rows_are_drawn_in_order():
    for seed, (size, count) in enumerate([(1, 1), (5, 1), (5, 4), (5, 5), (64, 40), (257, 100)] * 10):
        probabilities = inclusion_probabilities(skewed(size, 1.0, seed), count)
        rows = systematic(probabilities, count, generator(seed))
        assert rows.dtype == torch.int64
        assert rows.shape == (count,)
        assert (rows.diff() > 0).all()
        assert 0 <= int(rows[0]) <= int(rows[-1]) < size


def test_each_row_is_drawn_with_its_probability():
    count, draws = 5, 4000
    probabilities = inclusion_probabilities(skewed(12, 1.2, seed=3), count)
    assert float(probabilities.max()) == 1.0  # one is certain
    assert float(probabilities.min()) < 0.1
    counts, source = torch.zeros(12), generator(1)
    for _ in range(draws):
        counts[systematic(probabilities, count, source)] += 1
    for frequency, probability in zip((counts / draws).tolist(), probabilities.tolist(), strict=True):
        assert within(frequency, probability, draws)


def test_any_two_rows_can_be_drawn_together():
    """In a fixed order neighbours never would be."""
    source, pairs = generator(2), set()
    for _ in range(600):
        pairs.add(tuple(systematic(torch.full((6,), 1 / 3, dtype=torch.float64), 2, source).tolist()))
    assert pairs == set(itertools.combinations(range(6), 2))


def test_the_same_generator_gives_the_same_rows():
    probabilities = inclusion_probabilities(skewed(50, 1.0), 20)
    assert torch.equal(systematic(probabilities, 20, generator(7)), systematic(probabilities, 20, generator(7)))
    assert not torch.equal(systematic(probabilities, 20, generator(7)), systematic(probabilities, 20, generator(8)))


# ------------------------------------------------------------------------------------------------- gumbel


def test_gumbel_draws_one_after_the_other_in_proportion_to_exp_of_the_scores():
    weights = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
    p = (weights / weights.sum()).tolist()
    draws, source = 6000, generator(4)
    firsts, pairs = torch.zeros(4), torch.zeros(4, 4)
    for _ in range(draws):
        first, second = gumbel(weights.log(), source).topk(2).indices.tolist()
        firsts[first] += 1
        pairs[first, second] += 1
    for i in range(4):
        assert within(float(firsts[i]) / draws, p[i], draws)
        for j in range(4):
            if i != j:
                assert within(float(pairs[i, j]) / draws, p[i] * p[j] / (1 - p[i]), draws)
