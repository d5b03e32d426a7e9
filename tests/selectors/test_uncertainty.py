"""Uncertainty: entropy, least confidence and margin, against their closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from halfway.selectors.uncertainty import Uncertainty
from tests.helpers.classified import (
    candidates,
)
from tests.helpers.draws import generator

MEASURES = {
    "entropy": lambda q: -sum(v * math.log(v) for v in q if v > 0),
    "least_confidence": lambda q: 1 - max(q),
    "margin": lambda q: 1 - (sorted(q)[-1] - sorted(q)[-2]),
}


@pytest.mark.parametrize("measure", MEASURES)
def test_uncertainty_has_its_closed_form(measure):
    q = torch.tensor([[0.25] * 4, [0.7, 0.1, 0.1, 0.1], [0.4, 0.4, 0.1, 0.1], [0.5, 0.5, 0.0, 0.0], [1.0, 0, 0, 0]])
    found = Uncertainty(measure).importance(candidates({"logits": q.log()}, size=5))
    assert found.tolist() == pytest.approx([MEASURES[measure](row) for row in q.tolist()], abs=1e-6)
    assert int(found.argmax()) == 0 or measure == "margin"
    largest = {"entropy": math.log(4), "least_confidence": 0.75, "margin": 1.0}[measure]
    random = Uncertainty(measure).importance(candidates(torch.randn(200, 4, generator=generator())))
    assert float(random.max()) < float(found[0]) == pytest.approx(largest)


@pytest.mark.parametrize("measure", MEASURES)
def test_uncertainty_of_an_image_is_the_mean_over_its_pixels(measure):
    logits = torch.randn(3, 4, 2, 5, generator=generator())
    q = logits.double().softmax(1)
    expected = [
        sum(MEASURES[measure](q[i, :, y, x].tolist()) for y in range(2) for x in range(5)) / 10 for i in range(3)
    ]
    assert Uncertainty(measure).importance(candidates(logits)).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("measure", MEASURES)
def test_small_doubts_are_told_apart(measure):
    """1 - q1 in float32 would be 0 for all of them."""
    logits = torch.tensor([[30.0, 0, 0], [20.0, 0, 0], [25.0, 0, 0], [40.0, 0, 0]])
    assert Uncertainty(measure).select(candidates(logits), 2).indices.tolist() == [1, 2]


def test_uncertainty_needs_no_targets_but_classes():
    assert Uncertainty.wants_targets == "no"
    with pytest.raises(ValueError, match="two classes"):
        Uncertainty().select(candidates(torch.randn(4, 1)), 2)
