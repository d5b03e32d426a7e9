"""Balanced sampling: the same chance for everybody, and near-twins rarely together."""

from __future__ import annotations

import io
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfway import ForwardBlocker, Schedule
from halfway.selectors import Balanced, BalancedRemembered, Candidates
from halfway.selectors.balanced import classes_of, grid_means
from halfway.selectors.balanced_remembered import projection
from halfway.selectors.tools.channels import find_input_channel_dim
from halfway.selectors.tools.pivotal import _round, _systematic, _without_ties, distances, pivotal, rounds, standardised
from halfway.state import sample_memory as memories
from halfway.state.ranks import Ranks

from ..helpers import processes
from ..helpers.waiting import NoWaiting

CPU = torch.device("cpu")
# By where the features come from.
SOURCES = {"cut": Balanced, "remembered": BalancedRemembered}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed))


def candidates(features=None, seed=0, size=None, **others):
    source = seed if isinstance(seed, torch.Generator) else generator(seed)
    return Candidates(len(features) if size is None else size, source, features, **others)


def clustered(size, seed=0):
    """Some tight clusters of different sizes, some outliers."""
    centres = 5 * randn(4, 3, seed=seed)
    member = torch.randint(4, (size,), generator=generator(seed + 1)) ** 2 // 3
    x = centres[member] + 0.05 * randn(size, 3, seed=seed + 2)
    x[::7] = 8 * randn(len(x[::7]), 3, seed=seed + 3)
    return x


def between(x):
    return torch.cdist(x.double(), x.double(), compute_mode="donot_use_mm_for_euclid_dist")


def drawn(draw, size, draws):
    """(draws, size) of zeros and ones."""
    chosen = torch.zeros(draws, size, dtype=torch.float64)
    for row in chosen:
        row[draw()] = 1
    return chosen


def assert_equally_likely(chosen, probability):
    """Two tests at once. Each sample alone: no frequency is too far off. Together: neither is their sum of squares,
    which chi-square bounds, because samples of a fixed number are correlated negatively on average."""
    from scipy import stats  # here, so that the processes of other tests need not load it

    draws, size = chosen.shape
    z = (chosen.mean(0) - probability) / math.sqrt(probability * (1 - probability) / draws)
    assert z.abs().max() < stats.norm.isf(1e-5 / size)
    assert z.square().sum() < 2 * stats.chi2.isf(1e-5, size - 1)


# ----------------------------------------------------------------------------------------------- the pivotal method


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
            after = torch.stack([_round(far, mass, torch.full((whole,), n)) for n in range(chances)])
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
    after = _round(far, mass, torch.zeros(6, dtype=torch.int64))
    # 0 and 2 are each other's nearest, now that 1 is decided; 3 and 4 are too.
    assert after.tolist() == [6, 0, 0, 6, 0, 6]
    decided = torch.tensor([6, 0, 0, 6, 0, 6])
    assert torch.equal(_round(far, decided, torch.zeros(6, dtype=torch.int64)), decided)
    decided = torch.tensor([0, 6, 0, 6, 0, 6])
    assert torch.equal(_round(far, decided, torch.full((6,), 5)), decided)


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
    assert_equally_likely(drawn(lambda: pivotal(d, count, source), size, 700), count / size)


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
        mass = _round(far, mass, torch.randint(2**62, (size,), generator=source))
        assert mass.sum() == size * count
    assert (mass % size != 0).sum() <= 6


def test_those_who_are_all_alike_pair_off_at_random():
    """Without ties broken, all of them would name the same one as their nearest, and one pair would meet per round."""
    size, source = 64, generator(4)
    far = _without_ties(torch.zeros(size, size), source)
    assert torch.equal(far, far.T)
    mass = torch.full((size,), 24)
    for _ in range(rounds(size) // 2):
        mass = _round(far, mass, torch.randint(2**62, (size,), generator=source))
    assert (mass % size != 0).sum() <= 6
    far, other = (_without_ties(torch.ones(size, size), source) for _ in range(2))
    assert (far.argmin(1) != other.argmin(1)).sum() > size // 2
    apart = between(randn(size, 3))
    order = _without_ties(apart, source).argsort(1)
    assert torch.equal(order, apart.fill_diagonal_(math.inf).argsort(1))  # where there are no ties, nothing changes


# -------------------------------------------------------------------------------------------- coordinates, distances


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


def test_features_are_pooled_to_a_grid():
    image = torch.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6).float()
    by_hand = torch.stack([image[:, :, i : i + 2, j : j + 3].mean((2, 3)) for i in (0, 2) for j in (0, 3)], 2)
    for features, axis in ((image, 1), (image.permute(0, 2, 3, 1), -1), (image.permute(0, 2, 3, 1), 3)):
        torch.testing.assert_close(grid_means(features, axis, 2), by_hand.flatten(1))
        torch.testing.assert_close(grid_means(features, axis, 1), image.mean((2, 3)))
    assert grid_means(image[:, :, :1], 1, 2).shape == (2, 3 * 1 * 2)  # never more cells than there are
    tokens = randn(2, 7, 5)
    torch.testing.assert_close(grid_means(tokens, -1, 2), tokens.mean(1))
    torch.testing.assert_close(grid_means(tokens, 1, 2), tokens.mean(2))
    volume = randn(2, 3, 2, 2, 2)
    torch.testing.assert_close(grid_means(volume, 1, 2), volume.flatten(1))
    vectors = randn(2, 7).bfloat16()
    assert torch.equal(grid_means(vectors, 1, 2), vectors.float())
    with pytest.raises(ValueError, match="channel axis"):
        grid_means(torch.zeros(3), 1, 2)


def test_classes_come_from_labels_or_probabilities():
    labels = torch.tensor([2, 0, 1, 2])
    soft = F.one_hot(labels, 3) * 0.7 + 0.1
    for targets in (labels, labels.to(torch.uint8), soft, soft.double(), soft.bfloat16()):
        assert classes_of(targets, 4, CPU).tolist() == [2, 0, 1, 2]
    assert classes_of(torch.tensor([True, False, True, True]), 4, CPU).tolist() == [1, 0, 1, 1]
    for others in (
        None,
        "labels",
        labels.float(),
        labels[:3],
        torch.zeros(4, 8, 8).long(),
        torch.zeros(4, 1),
        (labels,),
    ):
        assert classes_of(others, 4, CPU) is None
    summing_to_one = randn(4, 3) - randn(4, 3).mean(1, keepdim=True) + 1 / 3
    for numbers in (randn(4, 3), 3 * soft, soft - 0.2, summing_to_one):  # regression, several labels
        assert len(classes_of(numbers, 4, CPU).unique()) == 1


# ------------------------------------------------------------------------------------------------ features at the cut


def test_features_at_the_cut_compete_within_their_class():
    """Every image is there twice, once in each of two classes, next to another class's copy of it."""
    size = 24
    x = randn(size, 6, 4, 4)
    classes = torch.arange(size) % 2
    x[1::2] = x[0::2]  # twins, but of the other class
    selector = Balanced()
    selector.bind("conv", nn.Conv2d(3, 6, 3))
    assert (selector.needs, selector.wants_ids, selector.wants_targets) == ("features", "optional", "optional")
    source, split = generator(0), []
    for targets in (None, classes):
        both = 0
        for _ in range(20):
            found = selector.select(candidates(x, source, targets=targets), size // 2)
            assert found.importance is None
            assert found.weights is None
            chosen = torch.zeros(size).index_fill(0, found.indices, 1)
            both += (chosen[0::2] == chosen[1::2]).sum().item()
            if targets is not None:
                assert classes[found.indices].bincount().tolist() == [size // 4, size // 4]
        split.append(both)
    assert split[0] == 0  # without classes exactly one of the twins stays
    assert split[1] > 50  # with classes they do not meet


def test_the_shares_of_classes_are_kept_to_a_sample():
    sizes = torch.tensor([3, 7, 12, 18])
    classes = torch.arange(4).repeat_interleave(sizes)
    selector, source = Balanced(), generator(1)
    spread = torch.zeros(4)
    for _ in range(30):
        rows = selector.select(candidates(randn(40, 5), source, targets=classes), 24).indices
        found = classes[rows].bincount(minlength=4)
        assert ((found - 0.6 * sizes).abs() <= 1).all()
        spread += found - 0.6 * sizes
    assert (spread / 30).abs().max() < 0.4


def test_shuffling_the_batch_does_not_change_anybodys_chance():
    size, count = 12, 5
    x, classes = clustered(size), torch.arange(size) % 3
    selector, source = Balanced(), generator(3)

    def draw():
        order = torch.randperm(size, generator=source)
        rows = selector.select(candidates(x[order], source, targets=classes[order]), count).indices
        return order[rows]

    shuffled = drawn(draw, size, 600)
    assert_equally_likely(shuffled, count / size)
    d = distances(standardised(x, torch.ones(size, dtype=torch.bool)), classes)
    direct = drawn(lambda: pivotal(d, count, source), size, 600)
    # Also who stays together.
    difference = (shuffled.T @ shuffled - direct.T @ direct) / 600
    assert difference.abs().max() < 5 * math.sqrt(2 * 0.25 / 600)


def test_the_scale_of_a_channel_does_not_matter_and_constant_channels_neither():
    x, scale = randn(20, 6), torch.tensor([1e-3, 1.0, 1e4, 1.0, 5.0, 1.0])
    for other in (x * scale + 3, torch.cat([x, torch.full((20, 4), 7.0)], 1)):
        a, b = (Balanced().select(candidates(f, 4), 9).indices for f in (x, other))
        assert torch.equal(a, b)


def test_the_layer_tells_where_the_channels_are():
    x = randn(16, 5, 5, 3)
    choices = []
    for features, layer, settings in (
        (x, nn.LayerNorm(3), {}),
        (x.permute(0, 3, 1, 2), nn.Conv2d(1, 3, 1), {}),
        (x, nn.Conv2d(1, 9, 1), {"channel_dim": -1}),
    ):
        selector = Balanced(**settings)
        selector.bind("layer", layer)
        choices.append(selector.select(candidates(features), 7).indices)
    assert all(torch.equal(a, b) for a, b in pairwise(choices))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_features_that_are_not_finite_prune_at_random_and_are_reported(bad):
    size, source, selector = 12, generator(0), Balanced()
    selector.bind("layer3", nn.Identity())
    twins = randn(size // 2, 4).repeat(2, 1)
    selector.select(candidates(twins, source), 6)
    selector.check()
    spoiled = twins.clone()
    spoiled[3, 1] = bad
    chosen = drawn(lambda: selector.select(candidates(spoiled, source), 6).indices, size, 400)
    assert_equally_likely(chosen, 0.5)
    assert (chosen[:, :6] == chosen[:, 6:]).double().mean() > 0.2  # twins are not seen
    with pytest.raises(FloatingPointError, match="'layer3'"):
        selector.check()
    selector.check()  # said once


# ------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("features", ["cut", "remembered"])
def test_the_last_known_loss_is_one_more_coordinate(features):
    size, ids = 16, torch.arange(16) + 4
    selector, source = SOURCES[features](num_samples=20), generator(0)
    x = torch.zeros(size, 3) if features == "cut" else None
    assert selector.wants_losses == "optional"
    pair = (torch.arange(size) % (size // 2)).float()

    def twins_split():
        chosen = drawn(lambda: selector.select(candidates(x, source, size, ids=ids), 8).indices, size, 30)
        return bool((chosen[:, :8] + chosen[:, 8:] == 1).all())

    assert not twins_split()
    retained = torch.arange(0, size, 2)
    selector.observe(candidates(x, size=size, ids=ids), retained, pair[retained])
    assert not twins_split()  # the others' are unknown
    selector.observe(candidates(x, size=size, ids=ids), None, pair)
    assert twins_split()
    other = SOURCES[features](num_samples=20)
    other.load_state_dict(selector.state_dict())
    selector = other
    assert twins_split()
    selector = SOURCES[features](num_samples=20, use_loss=False)
    assert selector.wants_losses == "no"
    selector.observe(candidates(x, size=size, ids=ids), None, pair)
    assert not twins_split()


def test_without_ids_or_losses_features_are_enough():
    selector, x = Balanced(), randn(10, 3)
    selector.observe(candidates(x), None, torch.ones(10))
    a = selector.select(candidates(x), 4).indices
    assert torch.equal(a, Balanced(use_loss=False).select(candidates(x), 4).indices)
    assert torch.equal(a, Balanced().select(candidates(x, ids=torch.arange(10)), 4).indices)


def test_losses_that_are_not_finite_are_unknown_and_reported():
    selector, ids = Balanced(), torch.arange(4)
    selector.observe(candidates(size=4, ids=ids), None, torch.tensor([1.0, math.nan, 2.0, math.inf]))
    assert selector.state_dict()["losses"].squeeze(1).isnan().tolist() == [False, True, False, True]
    assert len(selector.select(candidates(randn(4, 2), ids=ids), 2).indices) == 2
    with pytest.raises(FloatingPointError, match="observe"):
        selector.check()
    selector.check()


# ---------------------------------------------------------------------------------------------- remembered features


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU())
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def test_what_was_noted_of_a_sample_decides_next_time():
    size, ids = 16, torch.randperm(100, generator=generator(1))[:16]
    x = randn(size // 2, 5).repeat(2, 1)
    selector, source = BalancedRemembered(), generator(0)
    assert (selector.needs, selector.wants_ids) == ("nothing", "required")
    selector.watches(Net())

    def together(order):
        rows = [order[selector.select(candidates(None, source, size, ids=ids[order]), 8).indices] for _ in range(30)]
        chosen = torch.stack([torch.zeros(size).index_fill(0, r, 1) for r in rows])
        return (chosen[:, :8] + chosen[:, 8:] != 1).double().mean()

    assert together(torch.arange(size)) > 0.3  # nothing is known: random
    retained = torch.arange(0, size, 3)
    selector.note(candidates(size=size, ids=ids), retained, x[retained])
    assert together(torch.arange(size)) > 0.2
    selector.note(candidates(size=size, ids=ids), None, x)
    assert together(torch.arange(size)) == 0
    assert together(torch.randperm(size, generator=source)) == 0  # by id, not by place
    selector.note(candidates(size=2, ids=ids[:2]), None, 100 + x[:2])  # the last known ones count
    assert together(torch.arange(size)) > 0
    assert (selector.state_dict()["features"][ids[:2], :5] > 50).all()


def test_samples_of_which_nothing_is_remembered_are_average():
    size, selector, source = 12, BalancedRemembered(dim=3), generator(0)
    selector.note(candidates(size=6, ids=torch.arange(6)), None, randn(6, 3) + 50)
    x = standardised(selector.state_dict()["features"], torch.ones(6, dtype=torch.bool))
    d = distances(torch.cat([x, torch.zeros(6, 3)]))
    for seed in range(5):
        found = selector.select(candidates(None, seed, size, ids=torch.arange(size)), 5).indices
        assert torch.equal(found, pivotal(d, 5, generator(seed)))
    chosen = drawn(
        lambda: selector.select(candidates(None, source, size, ids=torch.arange(size)), 5).indices, size, 600
    )
    assert_equally_likely(chosen, 5 / size)


@pytest.mark.parametrize("width", [64, 65, 512])
def test_the_projection_keeps_neighbours(width):
    x = randn(40, width).repeat(2, 1) + 0.1 * randn(80, width, seed=1)
    selector = BalancedRemembered(num_samples=80)
    selector.note(candidates(size=80, ids=torch.arange(80)), None, x)
    found = selector.state_dict()["features"]
    assert found.shape == (80, 64)
    if width == 64:
        assert torch.equal(found, x)
    ratio = between(found) / between(x).fill_diagonal_(1)
    ratio = ratio[~torch.eye(80, dtype=torch.bool)]
    assert abs(ratio.mean() - 1) < 0.05
    assert ratio.std() < 1.5 / math.sqrt(2 * 64)
    nearest = between(found).fill_diagonal_(math.inf).argmin(1)
    assert torch.equal(nearest, (torch.arange(80) + 40) % 80)
    assert torch.equal(projection(width, 8), projection(width, 8))


def test_positions_are_averaged_where_the_layer_says():
    assert find_input_channel_dim(nn.Linear(5, 2), torch.Size((2, 9, 5))) == -1
    assert find_input_channel_dim(nn.Conv2d(5, 2, 1), torch.Size((2, 5, 9, 9))) == 1
    assert find_input_channel_dim(nn.Conv1d(5, 2, 1), torch.Size((2, 5, 9))) == 1
    assert find_input_channel_dim(nn.Sequential(nn.ReLU(), nn.LayerNorm(5)), torch.Size((2, 9, 9, 5))) == -1
    assert find_input_channel_dim(nn.BatchNorm2d(5), torch.Size((2, 5, 9, 9))) == 1
    assert find_input_channel_dim(nn.TransformerEncoderLayer(6, 2, 7), torch.Size((2, 9, 6))) == -1
    assert find_input_channel_dim(None, torch.Size((2, 9, 6))) == -1
    x = randn(6, 5, 3, 3)
    for settings, layer, watched in (
        ({}, nn.Conv2d(5, 2, 1), x),
        ({}, nn.Linear(5, 2), x.permute(0, 2, 3, 1).bfloat16().float()),
        ({"channel_dim": -1}, nn.Identity(), x.permute(0, 2, 3, 1)),
    ):
        selector = BalancedRemembered(module="0", **settings)
        selector.watches(nn.Sequential(layer))
        selector.note(candidates(size=6, ids=torch.arange(6)), None, watched)
        found = selector.state_dict()
        torch.testing.assert_close(found["features"][:, :5], x.mean((2, 3)), atol=3e-3, rtol=0)
        assert found["width"] == 5
        assert (found["features"][:, 5:] == 0).all()


def test_the_watched_layer_is_found_by_name_or_is_the_last_linear_one():
    net = Net()
    assert Balanced().watches(net) is None
    assert BalancedRemembered().watches(net) is net.head
    assert BalancedRemembered(module="body.1").watches(net) is net.body[1]
    assert BalancedRemembered().watches(net.head) is net.head  # a model that is a linear layer
    with pytest.raises(ValueError, match=r"no module 'haed'.*'head'"):
        BalancedRemembered(module="haed").watches(net)
    with pytest.raises(ValueError, match=r"does not end in a linear layer.*module="):
        BalancedRemembered().watches(nn.Sequential(nn.Conv2d(3, 3, 3)))


def test_what_does_not_fit_names_the_layer_and_the_fix():
    selector = BalancedRemembered(module="body")
    selector.watches(Net())
    batch = candidates(size=4, ids=torch.arange(4))
    for watched in (torch.zeros(8, 3), torch.zeros(4)):
        with pytest.raises(ValueError, match=r"'body'.*4 samples.*module="):
            selector.note(batch, None, watched)
    selector.note(batch, None, torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"'body' now has 5 channels, and 3.*channel_dim"):
        selector.note(batch, None, torch.zeros(4, 5))


@pytest.mark.parametrize("dim", [2, 3, 5])
def test_remembered_features_that_are_not_finite_are_unknown_and_reported(dim):
    selector = BalancedRemembered(num_samples=4, dim=dim)
    selector.watches(Net())
    watched = torch.tensor([[1.0, 2.0, 1.0], [1.0, math.nan, 0.0], [math.inf, 0.0, 0.0]])
    selector.note(candidates(size=3, ids=torch.arange(3)), None, watched)
    assert selector.state_dict()["features"].isnan().all(1).tolist() == [False, True, True, True]
    assert len(selector.select(candidates(size=4, ids=torch.arange(4)), 2).indices) == 2
    with pytest.raises(FloatingPointError, match="'head'"):
        selector.check()
    selector.check()
    selector.note(candidates(size=3, ids=torch.arange(3)), None, randn(3, 3))
    assert selector.state_dict()["features"].isnan().all(1).tolist() == [False, False, False, True]
    selector.check()


# ----------------------------------------------------------------------------------------------------- settings, state


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Balanced(grid=0), "at least 1"),
        (lambda: BalancedRemembered(dim=0), "at least 1"),
        (lambda: Balanced(num_samples=0), "at least 1"),
    ],
)
def test_wrong_settings_name_the_fix(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("features", "settings"), [("cut", {}), ("remembered", {}), ("remembered", {"use_loss": False})]
)
@pytest.mark.parametrize("num_samples", [None, 12])
def test_the_state_travels(features, settings, num_samples):
    first, second = (SOURCES[features](num_samples=num_samples, **settings) for _ in range(2))
    shapes = {k: getattr(v, "shape", None) for k, v in first.state_dict().items()}
    ids, x = torch.arange(12), randn(12, 80)
    first.watches(Net())
    first.note(candidates(size=12, ids=ids), None, x)
    first.observe(candidates(size=12, ids=ids), None, torch.arange(12.0))
    state = first.state_dict()
    if num_samples:
        assert shapes == {k: getattr(v, "shape", None) for k, v in state.items()}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    a, b = (s.select(candidates(x, ids=ids), 5).indices for s in (first, second))
    assert torch.equal(a, b)
    for selector in (first, second):
        selector.note(candidates(size=12, ids=ids), None, x.flip(0))
    a, b = (s.select(candidates(x, ids=ids), 5).indices for s in (first, second))
    assert torch.equal(a, b)
    if features == "remembered":
        assert second.state_dict()["width"] == 80
        with pytest.raises(ValueError, match="now has 70 channels, and 80"):
            second.note(candidates(size=12, ids=ids), None, x[:, :70])
        second.load_state_dict(BalancedRemembered(num_samples=num_samples, **settings).state_dict())  # a new beginning
        second.note(candidates(size=12, ids=ids), None, x[:, :70])
        torch.testing.assert_close(second.state_dict()["features"], x[:, :70] @ projection(70, 64))
    assert first.config() == second.config()
    assert first.config()["num_samples"] == num_samples


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    selector = BalancedRemembered(num_samples=5)
    selector.note(candidates(size=5, ids=torch.arange(5)), None, randn(5, 3))
    good = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in selector.state_dict().items()}
    for change in (
        {"features": torch.zeros(5, 63)},
        {"features": torch.zeros(4, 64)},
        {"losses": torch.zeros(5, 2)},
        {"width": -1},
        {"more": 0},
    ):
        with pytest.raises(ValueError, match="state"):
            selector.load_state_dict({**good, "losses": torch.ones(5, 1), **change})
    with pytest.raises(ValueError, match=r"has \['features', 'losses', 'width'\], this one has \['losses'\]"):
        selector.load_state_dict({"losses": torch.zeros(5, 1)})
    after = selector.state_dict()
    assert torch.equal(after["features"], good["features"])
    assert after["losses"].isnan().all()
    assert after["width"] == 3


# -------------------------------------------------------------------------------------------------- nothing waits


@pytest.mark.parametrize("features", ["cut", "remembered"])
def test_no_step_waits_for_the_device(features, monkeypatch):
    monkeypatch.setattr(memories, "_on_host", lambda ids: False)
    selector, ids, source = SOURCES[features](num_samples=30), torch.arange(20), generator(0)
    selector.watches(Net())
    x, losses, labels = randn(20, 70), torch.rand(20), torch.arange(20) % 3
    soft = F.one_hot(labels, 3).float()
    with NoWaiting():
        for targets in (labels, soft, None):
            now = candidates(x, source, ids=ids, targets=targets)
            rows = selector.select(now, 9).indices
            selector.learn(now, rows)
            selector.note(now, rows, x[rows])
            selector.observe(now, rows, losses[rows])
        with pytest.raises(AssertionError, match="waits"):
            losses[0].item()
    selector.check()


# --------------------------------------------------------------------------------------------- in training, on ranks


@pytest.mark.parametrize("features", ["cut", "remembered"])
def test_it_works_in_a_training_loop(features):
    torch.manual_seed(0)
    net, size = Net(), 20
    x, y, ids = torch.randn(size, 3, 6, 6), torch.arange(size) % 4, torch.arange(size)
    selector = SOURCES[features](num_samples=size)
    at = "body" if features == "cut" else None
    blocker = ForwardBlocker(net, at, 0.5, selector=selector, schedule=Schedule(1, unit="step"))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(4):
        part, part_y, rows = blocker(x, y, torch.arange(size), ids=ids)
        with torch.no_grad():
            entered = net.body(part).mean((2, 3))
        losses = F.cross_entropy(net(part), part_y, reduction="none")
        blocker.observe(losses)
        losses.mean().backward()
        optimizer.step()
        assert len(part) == (10 if step else 20)
        if step:
            assert ((part_y.bincount(minlength=4) - 2.5).abs() < 1).all()
        state = selector.state_dict()
        torch.testing.assert_close(state["losses"][rows].squeeze(1), losses.detach())
        assert not state["losses"].isnan().any()
        if features == "remembered":
            torch.testing.assert_close(state["features"][rows, :6], entered)
    assert blocker.stats.steps == 4


def remember(rank, steps):
    """Ranks with different numbers of batches share what they remember."""
    ranks, selector = Ranks(), BalancedRemembered(dim=4)
    for step in range(4):
        if step >= steps[rank]:
            ranks.send_nothing()
            continue
        ids = torch.arange(4) + 4 * (2 * step + rank)
        batch = Candidates(4, generator(step), ids=ids, ranks=ranks)
        retained = selector.select(batch, 3).indices
        selector.learn(batch, retained)
        selector.note(batch, retained, randn(100, 6)[ids][retained])
        selector.observe(batch, retained, ids[retained].float())
    selector.check()
    return selector.state_dict(), selector.select(Candidates(16, generator(9), ids=torch.arange(16)), 8).indices


def test_ranks_remember_the_same_bits():
    (first, rows), (second, other_rows) = processes.run(2, remember, (4, 3))
    assert first["width"] == second["width"] == 6
    for name in ("features", "losses"):
        assert torch.equal(first[name].view(torch.int32), second[name].view(torch.int32))
    assert torch.equal(rows, other_rows)
    known = first["losses"].squeeze(1).isfinite()
    assert known.sum() == 7 * 3
    assert torch.equal(first["losses"][known].squeeze(1), torch.arange(len(known))[known].float())
    torch.testing.assert_close(first["features"][known], randn(100, 6)[: len(known)][known] @ projection(6, 4))


def train(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    selector = BalancedRemembered(num_samples=40)
    blocker = ForwardBlocker(model, None, 0.4, selector=selector, timeout=20)
    for step in range(3):
        ids = torch.arange(10) + 20 * (step % 2) + 10 * rank
        x, y = blocker(randn(40, 3, 6, 6)[ids], ids % 4, ids=ids)
        losses = F.cross_entropy(model(x), y, reduction="none")
        blocker.observe(losses)
        losses.mean().backward()
    return selector.state_dict()


def test_ranks_in_a_training_loop_remember_the_same_bits():
    first, second = processes.run(2, train)
    for name in ("features", "losses"):
        assert torch.equal(first[name].view(torch.int32), second[name].view(torch.int32))
    assert first["features"].isfinite().all(1).sum() >= 24
