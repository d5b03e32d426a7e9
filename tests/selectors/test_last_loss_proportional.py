"""Last loss, proportional: each sample stays with exactly the probability its last loss gives it."""

from __future__ import annotations

import math

import pytest
import torch

from halfway.selectors import LastLossProportional
from halfway.selectors.tools.proportional import Proportions
from tests.helpers.draws import generator, within
from tests.helpers.remembered import NAN, candidates, frequencies, knowing

LOSSES = [0.01, 2.0, 0.3, NAN, 0.02, 4.0, 0.9, 0.0, NAN, 7.0]


def expected(losses, count, floor=0.1):
    """min(1, c w), with those that reach 1 set apart one at a time."""
    known = [v for v in losses if not math.isnan(v)]
    mean = sum(known) / len(known)
    w = [(mean if math.isnan(v) else v) + floor * mean for v in losses]
    certain: set[int] = set()
    while True:
        rest = sum(v for i, v in enumerate(w) if i not in certain)
        c = (count - len(certain)) / rest
        more = {i for i, v in enumerate(w) if i not in certain and c * v > 1}
        if not more:
            return [1.0 if i in certain else c * v for i, v in enumerate(w)]
        certain |= more


@pytest.mark.parametrize("count", [3, 5])
def test_each_sample_stays_as_often_as_its_last_loss_says(count):
    selector, draws = knowing(LOSSES, LastLossProportional), 3000
    assert (selector.needs, selector.wants_ids, selector.wants_losses) == ("nothing", "required", "required")
    found = selector.select(candidates(torch.arange(10)), count)
    # Losses are remembered in float32.
    assert found.importance.tolist() == pytest.approx(expected(LOSSES, count), rel=1e-6)
    assert float(found.importance.sum()) == pytest.approx(count, abs=1e-12)
    alone, _ = frequencies(selector, torch.arange(10), count, draws, generator(1))
    for frequency, probability in zip(alone.tolist(), expected(LOSSES, count), strict=True):
        assert within(frequency, probability, draws, sigmas=4)


def test_the_count_is_exact_and_rows_are_sorted():
    selector = knowing(LOSSES, LastLossProportional, floor=0.0, temperature=0.2)
    for seed in range(20):
        for count in range(1, 10):
            rows = selector.select(candidates(torch.arange(10), seed), count).indices
            assert rows.tolist() == sorted(set(rows.tolist()))
            assert len(rows) == count


def test_equal_losses_are_drawn_as_random_draws_them():
    alone, pairs = frequencies(knowing([1.5] * 6, LastLossProportional), torch.arange(6), 2, 2000, generator(0))
    assert all(within(f, 1 / 3, 2000, sigmas=4) for f in alone.tolist())
    for i in range(6):
        assert all(within(float(pairs[i, j]), 1 / 15, 2000) for j in range(6) if j != i)


def test_the_smaller_all_but_a_few_losses_are_the_more_those_few_are_preferred():
    """On the same ranks: what a rule by rank cannot tell apart."""
    ids = torch.arange(8)
    underfitting = knowing([1.8, 1.9, 2.0, 2.1, 2.2, 2.3, 2.4, 2.5], LastLossProportional)
    saturated = knowing([0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 2.4, 2.5], LastLossProportional)
    nearly_random = underfitting.select(candidates(ids), 4).importance
    assert 0.4 < float(nearly_random.min()) < float(nearly_random.max()) < 0.6
    assert saturated.select(candidates(ids), 4).importance[6:].tolist() == [1.0, 1.0]


def test_settings_are_those_of_the_rule_and_the_batch_is_what_they_are_relative_to():
    settings = {"scale": "bounded", "floor": 0.3, "temperature": 0.6, "cap": "chance", "num_classes": 10}
    selector = knowing(LOSSES, LastLossProportional, **settings)
    ids = torch.tensor([9, 1, 3, 2, 6])
    found = selector.select(candidates(ids), 2).importance
    assert torch.equal(found, Proportions(**settings).probabilities(torch.tensor(LOSSES)[ids], 2))
    assert selector.config() == {**settings, "num_samples": None}
    assert float(found[0]) == float(found[2])  # above ln 10, and not known


def test_what_was_reported_last_counts_and_what_is_not_finite_is_unknown_and_reported():
    selector = LastLossProportional()
    ids = torch.arange(4)
    selector.observe(candidates(ids), None, torch.tensor([1.0, 1.0, 1.0, 1.0]))
    selector.observe(candidates(ids), torch.tensor([1, 3]), torch.tensor([9.0, math.inf]))
    found = selector.select(candidates(ids), 1).importance.tolist()
    assert found == pytest.approx(expected([1.0, 9.0, 1.0, NAN], 1), rel=1e-6)
    with pytest.raises(FloatingPointError, match="observe"):
        selector.check()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": 0}, "temperature must be positive"),
        ({"cap": "chance"}, "num_classes"),
        ({"scale": "rank"}, "'loss', 'bounded'"),
        ({"num_samples": 0}, "at least 1"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        LastLossProportional(**settings)
