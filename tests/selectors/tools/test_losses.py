"""Losses and gradients per sample, against autograd."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F

from halfway.selectors.tools.losses import cross_entropy, logit_gradients
from tests.helpers.classified import (
    CLASSES,
    KINDS,
    slow_losses,
    some_logits,
    some_targets,
)
from tests.helpers.draws import generator


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_per_sample_are_those_of_autograd(kind):
    targets = some_targets(kind)
    logits = some_logits(targets)
    exact = logits.double().requires_grad_()
    expected = slow_losses(exact, targets)
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    found = cross_entropy(logits, targets)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), expected, atol=1e-6)
    assert torch.allclose(logit_gradients(logits, targets).double(), gradient, atol=1e-6)
    assert torch.allclose(logit_gradients(logits, targets, slow_losses).double(), gradient, atol=1e-6)


def test_logits_are_found_in_what_models_return():
    targets = some_targets("masks")
    logits, other = some_logits(targets), some_logits(targets, seed=5)
    expected, gradient = cross_entropy(logits, targets), logit_gradients(logits, targets)
    assert float(expected[3]) == 0  # the image without labels
    for outputs in (
        {"out": logits, "aux": other},
        OrderedDict(loss=torch.zeros(()), logits=logits, hidden_states=other),
        (logits, other),
        [logits],
        logits.to(torch.float64),
    ):
        assert torch.allclose(cross_entropy(outputs, targets).float(), expected, atol=1e-6)
        assert torch.allclose(logit_gradients(outputs, targets), gradient, atol=1e-6)
    with pytest.raises(TypeError, match="loss_fn"):
        cross_entropy({"features": logits}, targets)
    with pytest.raises(ValueError, match="target="):
        cross_entropy(logits, targets[:3])
    with pytest.raises(ValueError, match=r"a single class.*loss_fn"):  # regression: 0 for every sample, silently
        cross_entropy(logits[:, :1], logits[:, 0])


def test_masks_of_another_resolution_are_met_by_interpolation():
    masks = some_targets("masks")
    logits = torch.randn(6, CLASSES, 2, 3, generator=generator())
    exact = logits.double().requires_grad_()
    expected = slow_losses(F.interpolate(exact, (4, 6), mode="bilinear", align_corners=False), masks)
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    assert torch.allclose(cross_entropy(logits, masks).double(), expected, atol=1e-6)
    assert torch.allclose(logit_gradients(logits, masks).double(), gradient, atol=1e-6)


def test_gradients_are_given_where_grad_is_off():
    targets = some_targets("classes")
    with torch.no_grad():
        assert logit_gradients(some_logits(targets), targets).abs().sum() > 0
