"""EL2N: a mean over runs."""

from __future__ import annotations

import math

import pytest
import torch

from halfway.coresets import (
    EL2N,
    Evidence,
    measure,
)
from tests.helpers.draws import randn
from tests.helpers.evidence import evidence


def test_the_score_is_the_mean_over_runs():
    known = evidence()
    for i, found in enumerate(EL2N().score(known).tolist()):
        assert found == pytest.approx(sum(float(run.error_norms_N[i]) for run in known.short_runs) / 3)


def test_the_largest_error_of_a_linear_model_is_that_of_the_wrong_label():
    labels = torch.arange(20) % 2
    inputs = torch.nn.functional.one_hot(labels, 2).double() + 0.1 * randn(20, 2, seed=1).double()
    labels[7] = 1 - labels[7]
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False)).double()
    model[0].weight.data.copy_(torch.eye(2))
    run = measure.short_run(model, [(inputs, labels, torch.arange(20))], 20)
    slow = [
        math.hypot(*(p - y for p, y in zip(row, hot, strict=True)))
        for row, hot in zip(inputs.softmax(1).tolist(), torch.nn.functional.one_hot(labels, 2).tolist(), strict=True)
    ]
    known = Evidence(labels, 2, short_runs=[run])
    assert EL2N().score(known).tolist() == pytest.approx(slow)
    assert 7 in EL2N().choose(known, 0.2).ids.tolist()
