"""Selectors that remember how long a sample has waited, or its last loss; density as the authors' code scores it."""

from __future__ import annotations

import io
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfway import ForwardBlocker, Schedule
from halfway import functional as PF
from halfway.selectors import Candidates, Density, DensityPublic, LastLoss, LastLossHard, Random, Rotate
from halfway.selectors.tools.draw import gumbel
from halfway.state import sample_memory as memories
from halfway.state.ranks import Ranks

from ..helpers import processes
from ..helpers.waiting import NoWaiting


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed))


def candidates(ids=None, seed=0, size=None, **others):
    source = seed if isinstance(seed, torch.Generator) else generator(seed)
    return Candidates(len(ids) if size is None else size, source, ids=ids, **others)


def within(frequency, probability, draws, sigmas=5.0):
    return abs(frequency - probability) <= sigmas * math.sqrt(probability * (1 - probability) / draws) + 1e-12


def frequencies(selector, ids, count, draws, source):
    """How often each of the samples stays, and each pair of them."""
    chosen = torch.zeros(draws, len(ids), dtype=torch.float64)
    for row in chosen:
        row[selector.select(candidates(ids, source), count).indices] = 1
    return chosen.mean(0), chosen.T @ chosen / draws


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def epochs(number, samples, size, source):
    """Batches of shuffled ids."""
    for _ in range(number):
        yield from torch.randperm(samples, generator=source).split(size)


# --------------------------------------------------------------------------------------------------------- rotate


@pytest.mark.parametrize("num_samples", [None, 30])
def test_who_has_waited_longest_stays_against_a_reference(num_samples):
    selector, source, waited = Rotate(num_samples), generator(0), {}
    assert (selector.needs, selector.wants_ids, selector.wants_losses) == ("nothing", "required", "no")
    for step, ids in enumerate(epochs(15, 30, 10, source)):
        batch = candidates(ids, source)
        if step % 7 == 3:
            selector.learn(batch, None)
            waited.update(dict.fromkeys(ids.tolist(), 0))
            continue
        found = selector.select(batch, 4)
        before = [waited.get(id, 0) for id in ids.tolist()]
        assert found.importance.floor().tolist() == before
        retained = found.indices.tolist()
        assert retained == sorted(set(retained))
        assert len(retained) == 4
        pruned = [row for row in range(10) if row not in retained]
        assert min(before[row] for row in retained) >= max(before[row] for row in pruned)
        selector.learn(batch, found.indices)
        for row, id in enumerate(ids.tolist()):
            waited[id] = 0 if row in retained else before[row] + 1
    assert selector.state_dict()["waited"].squeeze(1).tolist()[:30] == [waited[id] for id in range(30)]


@pytest.mark.parametrize(("ratio", "variance", "furthest"), [(0.3, 0.65, 9), (0.5, 0.18, 5), (0.8, 0.12, 2)])
def test_samples_are_used_more_equally_than_at_random(ratio, variance, furthest):
    """Over five seeds. (Over 40 the ratios of variances were 0.45, 0.10 and 0.05 in the median.)"""
    samples, size, number = 60, 20, 20

    def used(selector, seed):
        source, times = generator(seed), torch.zeros(samples)
        for ids in epochs(number, samples, size, source):
            batch = candidates(ids, source)
            rows = selector.select(batch, PF.retained_count(size, ratio)).indices
            selector.learn(batch, rows)
            times[ids[rows]] += 1
        return times

    rotated, random = (torch.stack([used(make(), seed) for seed in range(5)]) for make in (Rotate, Random))
    assert rotated.sum() == random.sum()
    assert rotated.var(1).mean() < variance * random.var(1).mean()
    assert (rotated.amax(1) - rotated.amin(1)).max() <= furthest


def test_equals_are_drawn_at_random():
    selector, ids = Rotate(), torch.arange(6)
    selector.learn(candidates(ids), torch.tensor([0]))  # the others have waited for one offer
    alone, _ = frequencies(selector, ids, 2, 800, generator(2))
    assert alone[0] == 0
    assert all(within(f, 2 / 5, 800) for f in alone[1:].tolist())


def test_chance_never_makes_up_for_an_offer(monkeypatch):
    selector, ids = Rotate(), torch.arange(3)
    selector.load_state_dict({"waited": torch.tensor([[1.0], [1000.0], [999.0]])})
    monkeypatch.setattr(torch, "rand", lambda size, **_: torch.full((size,), 1 - 2**-24))  # the largest there is
    assert selector.importance(candidates(ids)).floor().tolist() == [1, 1000, 999]


# ------------------------------------------------------------------------------------------------------ last loss


def knowing(losses, make=LastLoss, **settings):
    """A selector that has seen these losses; NaN: not yet."""
    selector = make(**settings)
    losses = torch.tensor(losses)
    known = (~losses.isnan()).nonzero().squeeze(1)
    selector.observe(candidates(torch.arange(len(losses))), known, losses[known])
    selector.check()
    return selector


def scores(losses, temperature=1.0):
    """What "soft" weighs by, in plain Python."""
    known = [math.log(value) for value in losses if not math.isnan(value)]
    mean = sum(known) / len(known)
    sd = math.sqrt(sum((v - mean) ** 2 for v in known) / len(known))
    return [0.0 if math.isnan(v) else (math.log(v) - mean) / sd / temperature for v in losses]


def plackett_luce(scores, count):
    """The probability that each stays, and that each pair does, over all orders of drawing."""
    size = len(scores)
    alone, pairs = [0.0] * size, {}
    for order in itertools.permutations(range(size), count):
        probability, left = 1.0, sum(math.exp(s) for s in scores)
        for i in order:
            probability *= math.exp(scores[i]) / left
            left -= math.exp(scores[i])
        for i in order:
            alone[i] += probability
        for pair in itertools.permutations(order, 2):
            pairs[pair] = pairs.get(pair, 0.0) + probability
    return alone, pairs


NAN = math.nan


def test_hard_retains_the_largest_last_losses():
    losses = torch.rand(20, generator=generator(3)).tolist()
    selector = knowing(losses, LastLossHard)
    assert (selector.needs, selector.wants_ids, selector.wants_losses) == ("nothing", "required", "required")
    ids = torch.randperm(20, generator=generator(4))
    for seed in range(5):
        found = selector.select(candidates(ids, seed), 7)
        expected = sorted(range(20), key=lambda row: -losses[ids[row]])[:7]
        assert found.indices.tolist() == sorted(expected)
        torch.testing.assert_close(found.importance.float(), torch.tensor(losses)[ids])
    # What was reported last counts, and only of the retained.
    selector.observe(candidates(ids), torch.tensor([3, 11]), torch.tensor([5.0, -1.0]))
    losses[ids[3]], losses[ids[11]] = 5.0, -1.0
    expected = sorted(range(20), key=lambda row: -losses[ids[row]])
    assert selector.select(candidates(ids), 1).indices.tolist() == [3]
    assert selector.select(candidates(ids), 19).indices.tolist() == sorted(expected[:19])


def test_hard_takes_the_unknown_for_average_and_draws_among_equals():
    selector, source = knowing([1.0, 9.0, NAN, 2.0, NAN, NAN, 4.1], LastLossHard), generator(0)
    alone, _ = frequencies(selector, torch.arange(7), 3, 600, source)  # the mean is 4.025
    assert alone[[1, 6]].tolist() == [1, 1]
    assert alone[[0, 3]].tolist() == [0, 0]
    assert all(within(f, 1 / 3, 600) for f in alone[[2, 4, 5]].tolist())
    equal = knowing([2.0, 0.0, 0.0, 0.0, 0.0], LastLossHard)
    alone, _ = frequencies(equal, torch.arange(5), 3, 600, source)
    assert alone[0] == 1
    assert all(within(f, 1 / 2, 600) for f in alone[1:].tolist())


def test_hard_tells_neighbouring_numbers_apart():
    one = torch.tensor(1.0)
    up = torch.nextafter(one, torch.tensor(2.0)).item()
    losses = [1.0, up, 0.0, 1e-44, 3e-44, -1.0, -up, 1e30]
    selector = knowing(losses, LastLossHard)
    order = sorted(range(8), key=lambda i: -losses[i])
    for seed in range(20):
        for count in range(1, 8):
            assert selector.select(candidates(torch.arange(8), seed), count).indices.tolist() == sorted(order[:count])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("losses", [[0.1, 1.0, 2.0, 0.7], [0.1, NAN, 2.0, 0.7, NAN]])
def test_soft_draws_as_the_closed_form_says(temperature, losses):
    selector, draws = knowing(losses, temperature=temperature), 1500
    alone, pairs = frequencies(selector, torch.arange(len(losses)), 2, draws, generator(1))
    expected, expected_pairs = plackett_luce(scores(losses, temperature), 2)
    assert all(within(f, p, draws) for f, p in zip(alone.tolist(), expected, strict=True))
    assert all(within(pairs[i, j].item(), p, draws) for (i, j), p in expected_pairs.items())


def test_soft_is_relative_to_the_batch_at_hand():
    """Twice the losses, the same choice; and only those in the batch count."""
    a, b = knowing([0.1, 1.0, 2.0, 0.7, 50.0]), knowing([0.2, 2.0, 4.0, 1.4, 1e-3])
    for seed in range(20):
        found = [selector.select(candidates(torch.arange(4), seed), 2).indices for selector in (a, b)]
        assert torch.equal(*found)


def test_a_small_temperature_is_hard_and_a_large_one_random():
    losses = [0.1, 1.0, 2.0, 0.7, 0.3, 3.0]
    cold, warm = knowing(losses, temperature=1e-4), knowing(losses, temperature=1e6)
    for seed in range(20):
        assert cold.select(candidates(torch.arange(6), seed), 3).indices.tolist() == [1, 2, 5]
    alone, _ = frequencies(warm, torch.arange(6), 3, 1000, generator(0))
    assert all(within(f, 0.5, 1000) for f in alone.tolist())


@pytest.mark.parametrize("make", [LastLoss, LastLossHard])
@pytest.mark.parametrize("losses", [[NAN] * 6, [0.7] * 6, [0.0] * 6, [-1.0] * 6, [NAN, NAN, 3.0, NAN, NAN, NAN]])
def test_where_nobody_stands_out_everybody_is_equally_likely(make, losses):
    alone, _ = frequencies(knowing(losses, make), torch.arange(6), 2, 800, generator(0))
    assert all(within(f, 1 / 3, 800) for f in alone.tolist())


def test_losses_of_zero_and_below_are_small_and_not_infinitely_so():
    selector = knowing([1.0, 2.0, 0.0, -3.0, 1e-30, 3.0, 1.0])
    for seed in range(50):
        importance = selector.select(candidates(torch.arange(7), seed), 3).importance
        assert importance.isfinite().all()
    selector.check()
    alone, _ = frequencies(selector, torch.arange(7), 3, 600, generator(0))
    assert alone[[0, 1, 5, 6]].min() > alone[[2, 3, 4]].max()
    floor = 1e-6 * (7 - 3) / 7
    expected, _ = plackett_luce(scores([1.0, 2.0, floor, floor, floor, 3.0, 1.0]), 3)
    assert all(within(f, p, 600) for f, p in zip(alone.tolist(), expected, strict=True))
    # Without the noise, and with a loss in between, whose place depends on how small 0 is.
    selector = knowing([1.0, 2.0, 0.0, 0.01, 2.99])
    found = selector.importance(candidates(torch.arange(5), 3)) - gumbel(torch.zeros(5), generator(3))
    assert found.tolist() == pytest.approx(scores([1.0, 2.0, 1e-6 * 6 / 5, 0.01, 2.99]), rel=1e-5)


@pytest.mark.parametrize("make", [LastLoss, LastLossHard])
def test_losses_that_are_not_finite_are_unknown_and_reported(make):
    selector = make()
    ids = torch.arange(4)
    selector.observe(candidates(ids), None, torch.tensor([1.0, NAN, math.inf, 2.0]))
    assert selector.state_dict()["losses"].squeeze(1).isnan().tolist() == [False, True, True, False]
    assert len(selector.select(candidates(ids), 2).indices) == 2
    with pytest.raises(FloatingPointError, match="observe"):
        selector.check()
    selector.check()  # said once


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": 0}, "must be positive"),
        ({"temperature": NAN}, "must be positive"),
        ({"temperature": math.inf}, "must be positive"),
        ({"num_samples": 0}, "at least 1"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        LastLoss(**settings)


# ----------------------------------------------------------------------------------------------- what both share


def teach(selector, batch, retained, losses):
    selector.learn(batch, retained)
    selector.observe(batch, retained, losses)


@pytest.mark.parametrize("num_samples", [None, 12])
@pytest.mark.parametrize("make", [Rotate, LastLoss, LastLossHard])
def test_the_state_travels(make, num_samples):
    first, second = make(num_samples=num_samples), make(num_samples=num_samples)
    shapes = {k: v.shape for k, v in first.state_dict().items()}
    ids = torch.arange(12)
    teach(first, candidates(ids), torch.arange(0, 12, 2), torch.rand(6, generator=generator(1)))
    state = through_a_file(first.state_dict())
    if num_samples:
        assert shapes == {k: v.shape for k, v in state.items()}
    second.load_state_dict(state)
    a, b = (selector.select(candidates(ids), 5) for selector in (first, second))
    assert torch.equal(a.indices, b.indices)
    assert torch.equal(a.importance, b.importance)
    assert first.config() == second.config()
    assert first.config()["num_samples"] == num_samples
    assert LastLoss().config() != LastLoss(temperature=2.0).config()


@pytest.mark.parametrize("make", [Rotate, LastLoss, LastLossHard])
def test_a_state_that_does_not_fit_is_refused(make):
    selector = make(num_samples=4)
    key = next(iter(selector.state_dict()))
    for state in ({}, {"other": torch.zeros(4, 1)}, {key: torch.zeros(4)}, {key: torch.zeros(4, 2)}):
        with pytest.raises(ValueError, match="state"):
            selector.load_state_dict(state)
    with pytest.raises(ValueError, match="remembers 5 samples, here are 4"):
        selector.load_state_dict({key: torch.zeros(5, 1)})


@pytest.mark.parametrize("make", [Rotate, LastLoss, LastLossHard])
def test_an_id_out_of_range_is_named_at_once(make):
    with pytest.raises(ValueError, match="the id 4"):
        make(num_samples=4).select(candidates(torch.tensor([0, 4])), 1)


@pytest.mark.parametrize("make", [Rotate, LastLoss, LastLossHard])
def test_an_id_out_of_range_on_the_device_is_reported_by_check(make, monkeypatch):
    monkeypatch.setattr(memories, "_on_host", lambda ids: False)
    selector = make(num_samples=4)
    assert len(selector.select(candidates(torch.tensor([0, 4, 1])), 2).indices) == 2
    with pytest.raises(ValueError, match="out of range"):
        selector.check()
    selector.check()


@pytest.mark.parametrize(
    "selector", [Rotate(30), LastLoss(num_samples=30), LastLossHard(30), Density(8), DensityPublic(8)]
)
def test_no_step_waits_for_the_device(selector, monkeypatch):
    monkeypatch.setattr(memories, "_on_host", lambda ids: False)
    source, ids, features, losses = generator(0), torch.arange(20), randn(20, 6), torch.rand(20)
    selector.learn(candidates(ids, source, features=features), None)  # centroids are filled once, and read then
    with NoWaiting():
        for _ in range(3):
            batch = candidates(ids, source, features=features)
            rows = selector.select(batch, 9).indices
            teach(selector, batch, rows, losses[rows])
        with pytest.raises(AssertionError, match="waits"):
            losses[0].item()
    selector.check()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.ReLU())
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("name", ["rotate", "last_loss", "density_public"])
def test_they_work_in_a_training_loop_by_name(name):
    torch.manual_seed(0)
    net, ids = Net(), torch.arange(16)
    x, y = torch.randn(16, 5), torch.arange(16) % 4
    at = "body" if name == "density_public" else None
    blocker = ForwardBlocker(net, at, 0.5, selector=name, schedule=Schedule(1, unit="step"))
    seen = set()
    for step in range(3):
        part, part_y, rows = blocker(x, y, torch.arange(16), ids=ids)
        losses = F.cross_entropy(net(part), part_y, reduction="none")
        blocker.observe(losses)
        losses.mean().backward()
        assert len(part) == (8 if step else 16)
        if name == "last_loss":
            remembered = blocker.selector.state_dict()["losses"][rows].squeeze(1)
            torch.testing.assert_close(remembered, losses.detach())
        if name == "rotate" and step:
            assert not seen & set(rows.tolist())
            seen |= set(rows.tolist())
    assert blocker.stats.steps == 3


# --------------------------------------------------------------------------------------------------- several ranks


def remember(rank, name, steps):
    """Ranks with batches of different sizes, and different numbers of them, share what they remember."""
    ranks, selector = Ranks(), Rotate() if name == "rotate" else LastLossHard()
    told = []
    for step in range(4):
        if step >= steps[rank]:
            ranks.send_nothing()
            continue
        size = 6 - rank
        ids = (torch.arange(size) + 6 * rank) if step != 2 else (torch.arange(size) + 6 - 6 * rank)  # they swap
        batch = Candidates(size, generator(10 * step + rank), ids=ids, ranks=ranks)
        rows = selector.select(batch, 3).indices
        losses = torch.rand(3, generator=generator(100 * step + rank))
        teach(selector, batch, rows, losses)
        told.append((step, rank, ids.tolist(), rows.tolist(), losses.tolist()))
    selector.check()
    return selector.state_dict(), told


@pytest.mark.parametrize("name", ["rotate", "last_loss"])
def test_ranks_remember_the_same_bits(name):
    (first, told), (second, also_told) = processes.run(2, remember, name, (4, 3))
    key = "waited" if name == "rotate" else "losses"
    assert torch.equal(first[key].view(torch.int32), second[key].view(torch.int32))
    expected = {}
    for _, _, ids, rows, losses in sorted(told + also_told):
        for row, id in enumerate(ids):
            if name == "rotate":
                expected[id] = 0.0 if row in rows else expected.get(id, 0.0) + 1
            elif row in rows:
                expected[id] = losses[rows.index(row)]
    found = first[key].squeeze(1)
    for id, value in expected.items():
        assert found[id] == pytest.approx(value, rel=1e-6)
    if name == "last_loss":
        assert found.isfinite().sum() == len(expected)


def train(rank, name):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    blocker = ForwardBlocker(model, None, 0.5, selector=name, timeout=20)
    for step in range(4):
        ids = torch.arange(8) + 8 * ((rank + step) % 2)
        x, y = blocker(randn(16, 5)[ids], ids % 4, ids=ids)
        losses = F.cross_entropy(model(x), y, reduction="none")
        blocker.observe(losses)
        losses.mean().backward()
    return blocker.selector.state_dict()


def test_ranks_in_a_training_loop_take_turns_over_each_others_samples():
    """Each batch meets every rank; in two steps all of its samples have been retained once, whoever had it."""
    first, second = processes.run(2, train, "rotate")
    assert torch.equal(first["waited"], second["waited"])
    assert first["waited"].squeeze(1)[:8].sum() == first["waited"].squeeze(1)[8:16].sum() == 4
    assert first["waited"].max() == 1


# --------------------------------------------------------------------------- the density as the public code scores it


def reference_score(x, centroids):
    """The mean over the centroids of log N(x; c_j, diag(s)), with Silverman's standard deviations as variances."""
    import numpy as np
    from scipy import stats

    x, c = x.double().numpy(), centroids.double().numpy()
    C, D = c.shape
    variance = (4 / ((D + 2) * C)) ** (1 / (D + 4)) * c.std(0, ddof=1)
    return np.mean([stats.multivariate_normal.logpdf(x, mean=c[j], cov=np.diag(variance)) for j in range(C)], axis=0)


@pytest.mark.parametrize(("size", "C", "D"), [(20, 16, 5), (7, 5, 40), (9, 64, 1)])
def test_the_score_is_the_mean_of_log_kernels(size, C, D):
    x, centroids = 3 * randn(size, D), randn(C, D, seed=1) * torch.rand(D, generator=generator(2)) + 5
    expected = torch.from_numpy(reference_score(x, centroids))
    found = PF.mean_log_kernel(x.double(), centroids.double())
    torch.testing.assert_close(found, expected.reshape(-1))
    torch.testing.assert_close(PF.mean_log_kernel(x, centroids), expected.reshape(-1).float(), rtol=1e-4, atol=1e-3)


def learnt(selector, features):
    selector.bind("cut", nn.Identity())
    selector.learn(Candidates(len(features), generator(), features), None)
    return selector


def test_importance_is_minus_the_score_plus_gaussian_noise():
    features, draws = randn(12, 6), 600
    selector = learnt(DensityPublic(num_centroids=12), features)
    score = torch.from_numpy(reference_score(features, selector.estimator.centroids)).float()
    source = generator(5)
    noise = torch.stack(
        [selector.select(Candidates(12, source, features), 5).importance + score for _ in range(draws)]
    ) / (0.1 * score.abs().max())
    assert abs(noise.mean()) < 5 / math.sqrt(noise.numel())
    assert abs(noise.std() - 1) < 5 / math.sqrt(2 * noise.numel())
    assert abs(noise.pow(4).mean() - 3) < 5 * math.sqrt(96 / noise.numel())  # Gaussian
    correlation = torch.corrcoef(noise.T) - torch.eye(12)
    assert correlation.abs().max() < 5 / math.sqrt(draws)  # one for each sample
    found = selector.select(Candidates(12, source, features), 5)
    assert found.indices.tolist() == sorted(found.importance.topk(5).indices.tolist())


def test_it_prunes_the_centre_of_the_centroids():
    """Even where there is none of them: two clumps of centroids far apart, and a sample half-way between."""
    clumps = torch.cat([randn(8, 3) * 0.1 + 5, randn(8, 3, seed=1) * 0.1 - 5])
    x = torch.cat([clumps[::4], torch.zeros(1, 3)])
    public = learnt(DensityPublic(num_centroids=16), clumps)
    paper = learnt(Density(num_centroids=16, noise=0), clumps)
    assert PF.mean_log_kernel(x, public.estimator.centroids).argmax() == 4
    assert paper.estimator.log_density(x).argmin() == 4


def test_the_paper_s_density_draws_the_same_numbers_as_before():
    features = randn(12, 6)
    selector = learnt(Density(num_centroids=12), features)
    found = selector.select(Candidates(12, generator(3), features), 5)
    source = generator(3)
    torch.rand(12, generator=source)  # for a step that is not finite
    expected = PF.importance(selector.estimator.log_density(features), 0.01, source)
    assert torch.equal(found.importance, expected)


def test_features_that_are_not_finite_prune_at_random_and_are_reported():
    features = randn(12, 6)
    selector = learnt(DensityPublic(num_centroids=12), features)
    spoiled = features.clone()
    spoiled[3, 1] = math.nan
    source, draws, times = generator(0), 600, torch.zeros(12)
    for _ in range(draws):
        found = selector.select(Candidates(12, source, spoiled), 6)
        assert found.importance.isfinite().all()
        times[found.indices] += 1
    assert all(within(f, 0.5, draws) for f in (times / draws).tolist())
    selector.learn(Candidates(12, source, spoiled), None)
    with pytest.raises(FloatingPointError, match="'cut'"):
        selector.check()


@pytest.mark.parametrize("value", [1e15, 1e25, 3e38])
def test_huge_features_have_a_finite_importance(value):
    selector = learnt(DensityPublic(num_centroids=8), 1e-8 * randn(8, 4))
    x = torch.full((3, 4), value)
    x[1:] = 0
    assert selector.select(Candidates(3, generator(), x), 1).importance.isfinite().all()


def test_its_state_travels_and_its_settings_are_those_of_density():
    features = randn(12, 6)
    first, second = learnt(DensityPublic(12), features), DensityPublic(12)
    second.load_state_dict(through_a_file(first.state_dict()))
    a, b = (s.select(Candidates(12, generator(), features), 5).importance for s in (first, second))
    assert torch.equal(a, b)
    assert first.config() == Density(12).config()
    assert first.name == "density_public"
