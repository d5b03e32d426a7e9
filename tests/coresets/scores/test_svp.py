"""SVP: closed forms, and the least certain first."""

from __future__ import annotations

import math

import pytest
import torch

from halfway.coresets import (
    SVP,
    Evidence,
)
from tests.helpers.evidence import evidence


@pytest.mark.parametrize(
    ("measure", "slow"),
    [
        ("least_confidence", lambda p: 1 - max(p)),
        ("entropy", lambda p: -sum(v * math.log(v) for v in p)),
        ("margin", lambda p: 1 - (sorted(p)[-1] - sorted(p)[-2])),
    ],
)
def test_svp_retains_the_least_certain(measure, slow):
    known = evidence()
    found = SVP(measure).score(known)
    expected = [slow(row) for row in known.logits_NC.double().softmax(1).tolist()]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    sure = Evidence(torch.tensor([0, 0]), 2, logits_NC=torch.tensor([[9.0, 0.0], [0.1, 0.0]]))
    assert SVP(measure).choose(sure, 0.5, class_balance=False).ids.tolist() == [1]
