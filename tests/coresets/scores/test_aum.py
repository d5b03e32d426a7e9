"""AUM: margins of logits."""

from __future__ import annotations

import pytest
import torch

from halfway.coresets import (
    AUM,
    Dynamics,
    Evidence,
)
from tests.helpers.evidence import recorded


def test_aum_is_the_mean_margin_of_logits_and_the_lowest_are_retained():
    known = recorded([[30.0, 1.0, -2.0], [50.0, 3.0, 4.0]])
    assert AUM().score(known).tolist() == [-40.0, -2.0, -1.0]
    assert AUM().choose(known, 0.4, class_balance=False).ids.tolist() == [2]


def test_a_sample_that_was_never_presented_is_an_error():
    record = Dynamics(3)
    record.observe(torch.tensor([0, 2]), torch.zeros(2, 2), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="never presented"):
        AUM().score(Evidence(torch.zeros(3, dtype=torch.int64), 2, dynamics=record))
