"""Errors and margins of logits, in float64 loops."""

from __future__ import annotations

import math

import torch

from halfway.coresets.outputs import errors, margins
from tests.helpers.draws import randn


def test_errors_are_the_gradient_of_the_loss():
    logits, labels = 3 * randn(20, 5, seed=1).double(), torch.arange(20) % 5
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"), logits)
    assert torch.allclose(errors(logits.detach(), labels), gradient, atol=1e-14)


def test_a_sure_prediction_still_has_its_error():
    found = errors(torch.tensor([[40.0, 0.0]]), torch.tensor([0]))
    assert math.isclose(float(found.norm()), math.sqrt(2) * math.exp(-40), rel_tol=1e-5)


def test_margins_are_of_logits():
    logits, labels = randn(20, 5, seed=2), torch.arange(20) % 5
    for row, label, found in zip(logits.tolist(), labels.tolist(), margins(logits, labels).tolist(), strict=True):
        assert math.isclose(found, row[label] - max(v for c, v in enumerate(row) if c != label), abs_tol=1e-6)
    assert margins(torch.tensor([[100.0, 0.0]]), torch.tensor([0])).tolist() == [100.0]
