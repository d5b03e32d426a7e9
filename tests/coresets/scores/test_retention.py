"""The record of a run that pruned."""

from __future__ import annotations

import pytest
import torch

from halfway.coresets import (
    Evidence,
    RetentionRecord,
)


def test_a_retention_record_is_a_share_and_not_a_count():
    known = Evidence(
        torch.zeros(4, dtype=torch.int64),
        1,
        offered_N=torch.tensor([10, 2, 4, 8]),
        retained_N=torch.tensor([5, 2, 1, 6]),
    )
    assert RetentionRecord().score(known).tolist() == [0.5, 1.0, 0.25, 0.75]
    assert RetentionRecord().choose(known, 0.5).ids.tolist() == [1, 3]
    assert RetentionRecord("least").choose(known, 0.5).ids.tolist() == [0, 2]
    known.offered_N = torch.tensor([10, 0, 4, 8])
    with pytest.raises(ValueError, match="1 of 4 samples were never in a batch that was pruned"):
        RetentionRecord().score(known)
