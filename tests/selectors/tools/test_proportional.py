"""Weights on the losses' own scale: the closed form, the floor, the cap, what is unknown, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import brentq

from halfway.selectors.tools.proportional import Proportions, weights
from tests.helpers.draws import generator

NAN = math.nan


def by_hand(losses, scale="loss", floor=0.1, temperature=1.0, cap=None):
    """The rule, one number at a time, up to a common factor."""
    cap = math.inf if cap is None else cap
    g = [None if math.isnan(v) or v > cap else max(v, 0.0) for v in losses]
    if scale == "bounded":
        g = [None if v is None else 1 - math.exp(-v) for v in g]
    counted = [v for v in g if v is not None]
    mean = math.fsum(counted) / len(counted)
    return [((mean if v is None else v) + floor * mean) ** (1 / temperature) for v in g]


def solved(w, count):
    """min(1, c w) with the c for which they add up to `count`, found by bisection."""
    scale = max(w)
    w = [v / scale for v in w]
    c = brentq(lambda c: math.fsum(min(1.0, c * v) for v in w) - count, 0.0, 2 * count / min(w), xtol=1e-15, rtol=1e-14)
    return [min(1.0, c * v) for v in w]


def some_losses(size, seed, unknown=0):
    """As a training that is half done has them: many small, some large."""
    found = (2 * torch.randn(size, generator=generator(seed))).exp()
    found[:unknown] = NAN
    return found


SETTINGS = [
    {},
    {"scale": "bounded"},
    {"floor": 0.0},
    {"floor": 2.0},
    {"temperature": 0.25},
    {"temperature": 3.0},
    {"cap": 1.0},
    {"cap": 2.0, "scale": "bounded", "floor": 0.5, "temperature": 0.7},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("unknown", [0, 5])
def test_probabilities_are_min_1_c_w_for_the_weights_of_the_rule(settings, unknown):
    for count in (1, 9, 20, 29):
        losses_B = some_losses(30, seed=count, unknown=unknown)
        w = by_hand(losses_B.double().tolist(), **settings)
        found = weights(losses_B, **settings)
        assert found.dtype == torch.float64
        assert found.tolist() == pytest.approx([v / max(w) for v in w], rel=1e-12)
        pi = Proportions(**settings).probabilities(losses_B, count)
        assert float(pi.sum()) == pytest.approx(count, abs=1e-12)
        assert pi.tolist() == pytest.approx(solved(w, count), rel=1e-9)


@pytest.mark.parametrize("losses", [[2.0] * 6, [0.0] * 6, [-1.0] * 6, [NAN] * 6, [3.0, NAN, NAN, NAN, NAN, NAN]])
@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("scale", ["loss", "bounded"])
def test_where_no_loss_stands_out_all_weights_are_equal(losses, floor, scale):
    assert weights(torch.tensor(losses), floor=floor, scale=scale).tolist() == [1.0] * 6
    found = Proportions(floor=floor, scale=scale).probabilities(torch.tensor(losses), 2)
    assert found.tolist() == pytest.approx([1 / 3] * 6, rel=1e-12)


def test_a_loss_of_zero_has_the_floor_and_without_one_it_waits_for_all_others():
    losses = torch.tensor([0.0, 0.0, 0.0, 4.0])
    assert weights(losses, floor=0.1).tolist() == pytest.approx([0.1 / 4.1] * 3 + [1.0])
    found = Proportions(floor=0.0).probabilities(losses, 1).tolist()
    assert found == pytest.approx([0.0] * 3 + [1.0], abs=1e-12)
    assert Proportions(floor=0.0).probabilities(losses, 2).tolist() == pytest.approx([1 / 3] * 3 + [1.0])


def test_the_scale_decides_how_much_a_batch_of_large_losses_differs_from_one_of_small_ones():
    """Twice the loss is twice the weight, or nearly the same one once both are certainly wrong."""
    small, large = torch.tensor([0.01, 0.02]), torch.tensor([10.0, 20.0])
    for losses in (small, large):
        assert float(weights(losses, floor=0.0)[0]) == pytest.approx(0.5, rel=1e-6)
    assert float(weights(small, floor=0.0, scale="bounded")[0]) == pytest.approx(0.5, abs=0.01)
    assert float(weights(large, floor=0.0, scale="bounded")[0]) > 0.9999


def test_a_small_temperature_retains_the_largest_and_a_large_one_draws_at_random():
    losses = torch.tensor([0.1, 1.0, 2.0, 0.7, 0.3, 3.0])
    cold = Proportions(temperature=0.01).probabilities(losses, 3)
    assert cold.tolist() == pytest.approx([0.0, 1.0, 1.0, 0.0, 0.0, 1.0], abs=1e-6)
    warm = Proportions(temperature=1e6).probabilities(losses, 3)
    assert warm.tolist() == pytest.approx([0.5] * 6, abs=1e-5)


def test_a_loss_above_the_cap_counts_as_average_and_does_not_raise_the_average():
    capped = weights(torch.tensor([1.0, 3.0, 2.0, 100.0]), cap=3.0)
    assert torch.equal(capped, weights(torch.tensor([1.0, 3.0, 2.0, NAN])))
    assert capped.tolist() == pytest.approx([1.2 / 3.2, 1.0, 2.2 / 3.2, 2.2 / 3.2])  # 3.0 itself is not above it
    assert weights(torch.tensor([5.0, 7.0, 9.0]), cap=3.0).tolist() == [1.0] * 3


def test_the_loss_of_a_guess_is_the_logarithm_of_the_number_of_classes():
    losses = torch.tensor([0.1, 2.2, 2.4, 9.0])
    assert Proportions(cap="chance", num_classes=10).largest == math.log(10)
    found = Proportions(cap="chance", num_classes=10).weights(losses)
    assert torch.equal(found, weights(losses, cap=2.302585))
    assert Proportions(num_classes=10).largest is None  # asked for or not at all


def test_which_losses_are_known_can_be_said():
    losses = torch.tensor([1.0, 2.0, 50.0, math.inf])
    known = torch.tensor([True, True, False, True])
    assert torch.equal(weights(losses, known), weights(torch.tensor([1.0, 2.0, NAN, NAN])))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scale": "log"}, "scale must be one of 'loss', 'bounded', got 'log'"),
        ({"floor": -0.1}, "floor .* must not be negative"),
        ({"floor": NAN}, "floor"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": math.inf}, "temperature must be positive"),
        ({"cap": 0.0}, "cap is a loss and must be positive"),
        ({"cap": NAN}, "cap is a loss and must be positive"),
        ({"cap": "guess"}, "'chance' or None, got 'guess'"),
        ({"cap": "chance"}, "pass num_classes"),
        ({"cap": "chance", "num_classes": 1}, "pass num_classes, at least 2"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        Proportions(**settings)
