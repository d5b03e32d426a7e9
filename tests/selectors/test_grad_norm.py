"""Gradient norms: drawn in proportion to them, and weighted so that the mean of the batch stays unbiased."""

from __future__ import annotations

import math

import pytest
import torch

from halfway.selectors.grad_norm import GradNorm
from halfway.selectors.tools.losses import cross_entropy, logit_gradients
from tests.helpers.classified import (
    KINDS,
    candidates,
    skewed_batch,
    slow_losses,
    some_logits,
    some_targets,
)
from tests.helpers.draws import generator, within


def test_the_importance_is_the_norm_of_the_gradient():
    for kind in KINDS:
        targets = some_targets(kind)
        logits = some_logits(targets)
        exact = logits.double().requires_grad_()
        (gradient,) = torch.autograd.grad(slow_losses(exact, targets).sum(), exact)
        found = GradNorm().select(candidates((logits, None), targets, size=6), 3)
        assert torch.allclose(found.importance.double(), gradient.flatten(1).norm(dim=1), atol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.1])
def test_weighted_losses_estimate_the_mean_of_the_batch_without_bias(uniform):
    logits, targets = skewed_batch()
    losses = cross_entropy(logits, targets).double()
    selector, source, draws = GradNorm(uniform), generator(8), 800
    estimates, counts, weights = [], torch.zeros(12), torch.zeros(12)
    for _ in range(draws):
        found = selector.select(candidates(logits, targets, seed=source), 4)
        assert found.weights.dtype == torch.float32
        estimates.append((found.weights * losses[found.indices]).mean())
        counts[found.indices] += 1
        weights[found.indices] = found.weights
    estimates = torch.stack(estimates)
    assert abs(estimates.mean() - losses.mean()) < 5 * estimates.std() / math.sqrt(draws) + 1e-6
    # Each is drawn as often as its weight says.
    drawn = counts > 0
    for count, weight in zip(counts[drawn].tolist(), weights[drawn].tolist(), strict=True):
        assert within(count / draws, 4 / (12 * weight), draws)
    assert float(weights.max()) > 2
    if uniform:
        assert float(weights.max()) <= 1 / uniform + 1e-5


def test_the_estimate_of_the_gradient_varies_less_than_with_uniform_sampling():
    logits, targets = skewed_batch(32, sharpness=12.0)
    gradients = logit_gradients(logits, targets)
    errors = {}
    for uniform in (0.1, 1.0):
        selector, source = GradNorm(uniform), generator(9)
        found = [selector.select(candidates(logits, targets, seed=source), 8) for _ in range(200)]
        estimates = torch.stack([(s.weights[:, None] * gradients[s.indices]).mean(0) for s in found])
        errors[uniform] = float((estimates - gradients.mean(0)).square().sum(1).mean())
        if uniform == 1:
            assert all(torch.allclose(s.weights, torch.ones(8)) for s in found)
    assert errors[0.1] < 0.2 * errors[1.0]


def test_certain_samples_have_the_weight_of_certainty():
    logits, targets = skewed_batch()
    found = GradNorm().select(candidates(logits, targets), 9)
    assert {0, 1} <= set(found.indices.tolist())
    assert found.weights[:2].tolist() == pytest.approx([9 / 12, 9 / 12])
