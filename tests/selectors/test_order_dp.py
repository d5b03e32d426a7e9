"""OrderDP: the largest last losses of a random pool, against a slow loop and in closed form."""

from __future__ import annotations

from math import comb

import pytest
import torch

from halfway.selectors import LastLossHard, OrderDP
from tests.helpers.draws import generator, within
from tests.helpers.remembered import NAN, candidates, frequencies, knowing


def one_by_one(losses, pool, count):
    """The rows that stay, given the pool: the hardest, one after the other."""
    left, stay = set(pool), []
    for _ in range(count):
        hardest = max(left, key=lambda row: losses[row])
        left.remove(hardest)
        stay.append(hardest)
    return sorted(stay)


@pytest.mark.parametrize(("pool", "count"), [(0.8, 10), (0.8, 16), (0.5, 3), (1.0, 10), (0.33, 5)])
def test_the_hardest_of_the_pool_stay(pool, count):
    losses = torch.rand(20, generator=generator(3)).tolist()
    selector = knowing(losses, OrderDP, pool=pool)
    assert (selector.needs, selector.wants_ids, selector.wants_losses) == ("nothing", "required", "required")
    ids, pools = torch.randperm(20, generator=generator(4)), set()
    for seed in range(20):
        found = selector.select(candidates(ids, seed), count)
        source = generator(seed)
        torch.rand(20, generator=source, dtype=torch.float64)  # breaks ties
        drawn = torch.randperm(20, generator=source)[: round(pool * 20)].tolist()
        assert found.indices.tolist() == one_by_one([losses[i] for i in ids], drawn, count)
        torch.testing.assert_close(found.importance.float(), torch.tensor(losses)[ids])
        pools.add(tuple(sorted(drawn)))
    assert len(pools) == (1 if pool == 1 else 20)


def test_each_rank_stays_as_often_as_the_hypergeometric_distribution_says():
    """The r-th hardest of B stays if it is in the pool of P, with fewer than S of the harder ones."""
    size, pool, count, draws = 10, 8, 5, 3000
    selector = knowing([10.0 - r for r in range(size)], OrderDP)
    alone, _ = frequencies(selector, torch.arange(size), count, draws, generator(0))
    for r, frequency in enumerate(alone.tolist()):
        ways = sum(comb(r, harder) * comb(size - 1 - r, pool - 1 - harder) for harder in range(min(r, count - 1) + 1))
        assert within(frequency, ways / comb(size, pool), draws, sigmas=4)
    assert alone[0] < 0.85  # the hardest is not in every step


def test_the_unknown_are_average_and_equals_are_drawn():
    selector, source = knowing([1.0, 9.0, NAN, 2.0, NAN, NAN, 4.1], OrderDP, pool=1.0), generator(0)
    alone, _ = frequencies(selector, torch.arange(7), 3, 600, source)  # the mean is 4.025
    assert alone[[1, 6]].tolist() == [1, 1]
    assert alone[[0, 3]].tolist() == [0, 0]
    assert all(within(f, 1 / 3, 600) for f in alone[[2, 4, 5]].tolist())


@pytest.mark.parametrize("losses", [[NAN] * 6, [0.7] * 6, [0.0] * 6])
def test_where_no_loss_stands_out_the_choice_is_random(losses):
    alone, _ = frequencies(knowing(losses, OrderDP), torch.arange(6), 2, 1000, generator(0))
    assert all(within(f, 1 / 3, 1000) for f in alone.tolist())


def test_a_pool_of_all_is_hard_and_one_below_the_count_is_random():
    losses = torch.rand(12, generator=generator(5)).tolist()
    ids = torch.arange(12)
    hard, whole = knowing(losses, LastLossHard), knowing(losses, OrderDP, pool=1.0)
    assert torch.equal(hard.select(candidates(ids), 5).indices, whole.select(candidates(ids), 5).indices)
    alone, _ = frequencies(knowing(losses, OrderDP, pool=0.3), ids, 6, 1000, generator(0))
    assert all(within(f, 0.5, 1000) for f in alone.tolist())


@pytest.mark.parametrize("pool", [0.0, -0.5, 1.01, NAN])
def test_a_pool_that_is_no_share_is_refused(pool):
    with pytest.raises(ValueError, match=r"share of the batch and must be in \(0, 1\]"):
        OrderDP(pool=pool)
