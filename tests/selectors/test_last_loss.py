"""Last loss: drawn by the last known losses, against the closed form; what is unknown, zero or not finite."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from halfway.selectors import LastLoss, LastLossHard
from halfway.selectors.tools.draw import gumbel
from tests.helpers.draws import generator, within
from tests.helpers.remembered import NAN, candidates, frequencies, knowing


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
