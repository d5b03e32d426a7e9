"""The local pivotal method: the same chance for all, neighbours rarely together; its coordinates and distances."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from halfway.selectors.tools.draw import inclusion_probabilities
from halfway.selectors.tools.pivotal import (
    _WHOLE,
    _masses,
    _round,
    _systematic,
    _without_ties,
    distances,
    pivotal,
    rounds,
    standardised,
)
from tests.helpers.balanced import assert_equally_likely, between, clustered, drawn
from tests.helpers.draws import generator, randn, within

# -------------------------------------------------------------------------------------------- the pivotal method


@pytest.mark.parametrize("whole", [2, 5, 12])
def test_a_duel_is_a_fair_bet_for_all_masses(whole):
    """Over all equally likely numbers of the dice, the average mass afterwards is the one before, exactly."""
    far = torch.full((whole, whole), 9.0, dtype=torch.float64).fill_diagonal_(math.inf)
    far[0, 1] = far[1, 0] = 1.0
    for a in range(1, whole):
        for b in range(1, whole):
            mass = torch.zeros(whole, dtype=torch.int64)
            mass[0], mass[1] = a, b
            chances = a + b if a + b < whole else 2 * whole - a - b
            after = torch.stack([_round(far, mass, torch.full((whole,), n), whole) for n in range(chances)])
            assert (after.sum(0) == chances * mass).all()
            assert (after.sum(1) == a + b).all()
            assert ((after[:, :2] % whole == 0).sum(1) >= 1).all()
            assert ((after >= 0) & (after <= whole)).all()


def test_those_left_are_drawn_with_exactly_their_mass():
    for seed in range(20):
        source = generator(seed)
        whole = int(torch.randint(3, 15, (), generator=source))
        mass = torch.randint(0, whole + 1, (whole,), generator=source)
        mass[0] = 0
        mass[0] = -mass.sum() % whole
        taken = torch.stack([_systematic(mass, torch.tensor(start), whole) for start in range(whole)])
        assert (taken.sum(0) == mass).all()
        assert (taken.sum(1) == mass.sum() // whole).all()
        assert ((taken == 0) | (taken == 1)).all()


def test_who_is_decided_stays_and_strangers_do_not_meet():
    x = torch.tensor([[0.0], [1.0], [1.1], [5.0], [5.2], [9.0]])
    far = between(x).fill_diagonal_(math.inf)
    mass = torch.tensor([3, 0, 3, 3, 3, 6])
    after = _round(far, mass, torch.zeros(6, dtype=torch.int64), 6)
    # 0 and 2 are each other's nearest, now that 1 is decided; 3 and 4 are too.
    assert after.tolist() == [6, 0, 0, 6, 0, 6]
    decided = torch.tensor([6, 0, 0, 6, 0, 6])
    assert torch.equal(_round(far, decided, torch.zeros(6, dtype=torch.int64), 6), decided)
    decided = torch.tensor([0, 6, 0, 6, 0, 6])
    assert torch.equal(_round(far, decided, torch.full((6,), 5), 6), decided)


@pytest.mark.parametrize("size", [1, 2, 3, 16, 37])
def test_the_count_is_exact(size):
    for seed, x in enumerate((randn(size, 2), clustered(size), torch.zeros(size, 2), randn(size, 99))):
        for count in range(1, size + 1, 1 + size // 12):
            rows = pivotal(between(x), count, generator(seed))
            assert rows.dtype == torch.int64
            assert rows.tolist() == sorted(set(rows.tolist()))
            assert len(rows) == count
            assert rows[-1] < size
    for count in (0, size + 1):
        with pytest.raises(ValueError, match="cannot retain"):
            pivotal(between(x), count, generator())


@pytest.mark.parametrize(("count", "make"), [(6, clustered), (7, clustered), (11, randn), (4, torch.zeros)])
def test_every_sample_is_drawn_equally_often(count, make):
    size, source = 13, generator(5)
    d = between(make(size, 3) if make is not clustered else clustered(size))
    assert_equally_likely(drawn(lambda: pivotal(d, count, source), size, 400), count / size)


def test_also_where_rounds_do_not_suffice(monkeypatch):
    """Points on a line, each twice as far from the last: one pair meets in a round, the rest is drawn together."""
    monkeypatch.setattr("halfway.selectors.tools.pivotal.rounds", lambda size: 2)
    size, source = 12, generator(1)
    d = between(2.0 ** torch.arange(size).unsqueeze(1))
    chosen = drawn(lambda: pivotal(d, 5, source), size, 1000)
    assert (chosen.sum(1) == 5).all()
    assert_equally_likely(chosen, 5 / size)


@pytest.mark.parametrize("copies", [2, 4])
@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_of_twins_exactly_one_stays(copies, noise):
    size, source = 32, generator(2)
    x = randn(size // copies, 5).repeat(copies, 1) + noise * randn(size, 5, seed=1)
    order = torch.randperm(size, generator=generator(3))
    d = between(x[order])
    family = (torch.arange(size) % (size // copies))[order]
    winners = torch.zeros(size)
    for _ in range(60):
        rows = pivotal(d, size // 2, source)
        assert (family[rows].bincount(minlength=size // copies) == copies // 2).all()
        winners[rows] += 1
    assert winners.min() > 10  # drawn, not always the same
    assert winners.max() < 50


def lpm(d, count, source):
    """The sequential method as Grafström et al. describe it (LPM1), with float probabilities and one pair at a time."""
    size, d = len(d), d.tolist()
    p = [count / size] * size
    left = list(range(size))
    while len(left) > 1:
        nearest = {i: min((d[i][j], j) for j in left if j != i)[1] for i in left}
        mutual = [i for i in left if nearest[nearest[i]] == i]
        i = mutual[int(torch.randint(len(mutual), (), generator=source))]
        j, total = nearest[i], p[i] + p[nearest[i]]
        u = float(torch.rand((), generator=source))
        if total < 1:
            p[i], p[j] = (total, 0.0) if u < p[i] / total else (0.0, total)
        else:
            p[i], p[j] = (1.0, total - 1) if u < (1 - p[j]) / (2 - total) else (total - 1, 1.0)
        left = [k for k in left if 1e-9 < p[k] < 1 - 1e-9]
    return [k for k in range(size) if p[k] > 0.5]


def test_samples_are_as_well_spread_as_those_of_the_sequential_method():
    """How far the mean of the retained is from that of all, for smooth functions; how often neighbours stay both."""
    size, count, draws = 30, 12, 100
    x = clustered(size)
    d, source = between(x), generator(0)
    probe = torch.cat([x, torch.sin(x), torch.cos(x @ randn(3, 3))], 1).double()
    probe = (probe - probe.mean(0)) / probe.std(0)
    nearest = d.clone().fill_diagonal_(math.inf).argmin(1)

    def quality(draw):
        chosen = drawn(draw, size, draws)
        together = (chosen * chosen[:, nearest]).mean()
        return float((chosen @ probe / count).square().mean()), float(together)

    ours = quality(lambda: pivotal(d, count, source))
    theirs = quality(lambda: lpm(d, count, source))
    random = quality(lambda: torch.randperm(size, generator=source)[:count])
    assert ours[0] < 1.3 * theirs[0]
    assert ours[1] < 1.3 * theirs[1] + 0.01
    assert ours[0] < 0.5 * random[0]
    assert ours[1] < 0.6 * random[1]


def test_regions_get_their_share():
    """Spatial balance (Stevens & Olsen): the number of samples around each retained one is nearly the same."""
    size, count, source = 60, 20, generator(0)
    x = torch.rand(size, 2, generator=generator(9))
    d = between(x)

    def imbalance(rows):
        around = d[:, rows].argmin(1).bincount(minlength=count) * count / size
        return float(around.double().var())

    ours = sum(imbalance(pivotal(d, count, source)) for _ in range(60))
    random = sum(imbalance(torch.randperm(size, generator=source)[:count]) for _ in range(60))
    assert ours < 0.45 * random


def test_few_are_left_after_the_rounds():
    """Also among high-dimensional features of different sizes, where few pairs meet, and at p other than 0.5."""
    size, count = 128, 77
    x = F.relu(randn(size, 4) @ randn(4, 64, seed=1) + 0.3 * randn(size, 64, seed=2))
    far, source = between(x).fill_diagonal_(math.inf), generator(1)
    mass = torch.full((size,), count)
    for _ in range(rounds(size)):
        mass = _round(far, mass, torch.randint(2**62, (size,), generator=source), size)
        assert mass.sum() == size * count
    assert (mass % size != 0).sum() <= 6


def test_those_who_are_all_alike_pair_off_at_random():
    """Without ties broken, all of them would name the same one as their nearest, and one pair would meet per round."""
    size, source = 64, generator(4)
    far = _without_ties(torch.zeros(size, size), source)
    assert torch.equal(far, far.T)
    mass = torch.full((size,), 24)
    for _ in range(rounds(size) // 2):
        mass = _round(far, mass, torch.randint(2**62, (size,), generator=source), size)
    assert (mass % size != 0).sum() <= 6
    far, other = (_without_ties(torch.ones(size, size), source) for _ in range(2))
    assert (far.argmin(1) != other.argmin(1)).sum() > size // 2
    apart = between(randn(size, 3))
    order = _without_ties(apart, source).argsort(1)
    assert torch.equal(order, apart.fill_diagonal_(math.inf).argsort(1))  # where there are no ties, nothing changes


# --------------------------------------------------------------------------------------- unequal probabilities


def unequal(size, count, seed=0):
    """Probabilities that add up to `count`, some of them 1, some nearly 0."""
    return inclusion_probabilities((2 * randn(size, seed=seed)).exp(), count, smallest=0.0)


@pytest.mark.parametrize(("size", "count"), [(1, 1), (2, 1), (13, 5), (64, 40), (257, 100), (40, 39)])
def test_masses_are_the_probabilities_as_whole_numbers_that_add_up(size, count):
    for seed in range(20):
        p = unequal(size, count, seed)
        mass = _masses(p, count)
        assert mass.dtype == torch.int64
        assert int(mass.sum()) == count * _WHOLE
        assert 0 <= int(mass.min()) <= int(mass.max()) <= _WHOLE
        assert (mass.double() / _WHOLE - p).abs().max() < 2 / _WHOLE


def test_masses_of_the_certain_and_the_impossible():
    tiny = [1e-300, 0.0]
    assert _masses(torch.tensor([1.0, *tiny, 1.0], dtype=torch.float64), 2).tolist() == [_WHOLE, 0, 0, _WHOLE]
    almost = torch.tensor([1 - 1e-12, 1 - 1e-12, 1e-12, 1e-12], dtype=torch.float64)
    assert _masses(almost, 2).tolist() == [_WHOLE, _WHOLE, 0, 0]
    for seed in range(50):  # close to 1, where the rounding of the sums could give more than the whole
        rest = 10 ** (-10 * torch.rand(100, generator=generator(seed), dtype=torch.float64))
        mass = _masses(torch.cat([1 - rest, rest]), 100)
        assert int(mass.sum()) == 100 * _WHOLE
        assert 0 <= int(mass.min()) <= int(mass.max()) <= _WHOLE


def test_a_duel_of_unequal_masses_is_a_fair_bet():
    """A small whole, over all numbers of the dice; with three units that are far from the two that meet."""
    whole, far = 7, torch.full((5, 5), 9.0, dtype=torch.float64).fill_diagonal_(math.inf)
    far[0, 1] = far[1, 0] = 1.0
    for a in range(1, whole):
        for b in range(1, whole):
            mass = torch.tensor([a, b, 0, whole, 0])
            chances = a + b if a + b < whole else 2 * whole - a - b
            after = torch.stack([_round(far, mass, torch.full((5,), n), whole) for n in range(chances)])
            assert (after.sum(0) == chances * mass).all()


@pytest.mark.parametrize(("count", "make"), [(5, clustered), (9, clustered), (4, randn), (4, torch.zeros)])
def test_every_sample_is_drawn_with_its_own_probability(count, make):
    size, source, draws = 13, generator(5), 400
    d = between(make(size, 3) if make is not clustered else clustered(size))
    p = unequal(size, count, seed=count)
    assert float(p.max() - p.min()) > 0.4
    chosen = drawn(lambda: pivotal(d, count, source, p), size, draws)
    assert (chosen.sum(1) == count).all()
    for frequency, probability in zip(chosen.mean(0).tolist(), p.tolist(), strict=True):
        assert within(frequency, probability, draws, sigmas=4)


def test_also_unequal_ones_where_rounds_do_not_suffice(monkeypatch):
    monkeypatch.setattr("halfway.selectors.tools.pivotal.rounds", lambda size: 1)
    size, source, draws = 12, generator(1), 900
    d, p = between(2.0 ** torch.arange(size).unsqueeze(1)), unequal(12, 5)
    chosen = drawn(lambda: pivotal(d, 5, source, p), size, draws)
    assert (chosen.sum(1) == 5).all()
    for frequency, probability in zip(chosen.mean(0).tolist(), p.tolist(), strict=True):
        assert within(frequency, probability, draws, sigmas=4)


def test_unequal_twins_are_never_both_drawn_and_the_likelier_one_wins_more_often():
    size, source, draws = 16, generator(2), 400
    x = randn(size // 2, 5).repeat(2, 1)
    p = torch.cat([torch.linspace(0.5, 0.9, 8), torch.linspace(0.5, 0.1, 8)]).double()
    chosen = drawn(lambda: pivotal(between(x), 8, source, p), size, draws)
    assert (chosen[:, :8] + chosen[:, 8:] == 1).all()
    for frequency, probability in zip(chosen.mean(0).tolist(), p.tolist(), strict=True):
        assert within(frequency, probability, draws, sigmas=4)


# ---------------------------------------------------------------------------------------- coordinates, distances


def test_standardised_over_what_is_known():
    x = torch.tensor([[1.0, 7.0, 1e8], [3.0, 7.0, 1e8 + 8], [math.nan, 1e30, math.inf], [5.0, 7.0, 1e8]])
    known = torch.tensor([True, True, False, True])
    found = standardised(x, known)
    sd = math.sqrt(8 / 3)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found[:, 0], torch.tensor([-2 / sd, 0, 0, 2 / sd], dtype=torch.float64))
    assert (found[:, 1:] == 0).all()
    assert (standardised(x, torch.zeros(4, dtype=torch.bool)) == 0).all()


def test_distances_tell_near_twins_apart_and_keep_classes_apart():
    x = randn(40, 30).double()
    x[1] = x[0] + 1e-6
    x[2] = x[0]
    torch.testing.assert_close(distances(x), between(x), atol=1e-5, rtol=1e-9)
    found = distances(x)
    assert found[0, 2] < found[0, 1] < found[0].sort().values[3]
    classes = torch.arange(40) % 3
    found = distances(x, classes)
    same = classes.unsqueeze(0) == classes.unsqueeze(1)
    assert found[same].max() < found[~same].min()
    assert torch.equal(found[same], distances(x)[same])
