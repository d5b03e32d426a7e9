"""Forgetting: what was never learned, and what was never presented."""

from __future__ import annotations

import math

import pytest
import torch

from halfway.coresets import (
    Dynamics,
    Evidence,
    Forgetting,
)
from tests.helpers.evidence import recorded


def test_what_was_never_learned_counts_as_forgotten_infinitely_often():
    known = recorded([[1, -1, 1, -1], [1, -1, -1, 2], [1, -1, 1, 3], [1, -1, -1, 4]])
    assert Forgetting().score(known).tolist() == [0, math.inf, 2, 0]
    assert Forgetting().choose(known, 0.5, class_balance=False).ids.tolist() == [1, 2]


def test_a_sample_that_was_never_presented_is_an_error():
    record = Dynamics(3)
    record.observe(torch.tensor([0, 2]), torch.zeros(2, 2), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="never presented"):
        Forgetting().score(Evidence(torch.zeros(3, dtype=torch.int64), 2, dynamics=record))
