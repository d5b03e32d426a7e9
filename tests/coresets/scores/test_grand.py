"""GraNd: means over runs, and the gradient of the last layer from autograd."""

from __future__ import annotations

import math

import pytest
import torch

from halfway.coresets import (
    Evidence,
    GraNd,
    GraNdLast,
    ShortRun,
    measure,
)
from tests.helpers.draws import generator, randn
from tests.helpers.evidence import evidence


def test_scores_are_means_over_runs():
    known = evidence()
    whole, last = GraNd().score(known), GraNdLast().score(known)
    for i in range(60):
        runs = [(float(r.error_norms_N[i]), float(r.feature_norms_N[i])) for r in known.short_runs]
        assert float(whole[i]) == pytest.approx(sum(float(r.gradient_norms_N[i]) for r in known.short_runs) / 3)
        assert float(last[i]) == pytest.approx(sum(e * math.sqrt(1 + f * f) for e, f in runs) / 3)


def test_grand_of_a_single_layer_is_grand_of_the_last():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4)).double()
    inputs, labels = randn(12, 3, seed=6).double(), torch.arange(12) % 4
    run = measure.short_run(model, [(inputs, labels, torch.arange(12))], 12, gradients=True)
    known = Evidence(labels, 4, short_runs=[run])
    assert torch.allclose(GraNd().score(known), GraNdLast().score(known))


def test_grand_of_the_last_layer_is_the_norm_of_its_gradient():
    source = generator(4)
    layer = torch.nn.Linear(5, 3).double()
    features = torch.randn(7, 5, generator=source, dtype=torch.float64)
    labels = torch.arange(7) % 3
    logits = layer(features)
    error = torch.nn.functional.one_hot(labels, 3) - logits.softmax(1)
    known = Evidence(labels, 3, short_runs=[ShortRun(error.norm(dim=1), features.norm(dim=1))])
    for i in range(7):
        loss = torch.nn.functional.cross_entropy(logits[i], labels[i])
        weight, bias = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
        slow = torch.cat([weight.flatten(), bias]).norm()
        assert float(GraNdLast().score(known)[i]) == pytest.approx(float(slow))
