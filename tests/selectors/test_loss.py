"""Loss: the largest losses stay."""

from __future__ import annotations

import torch

from halfway.selectors import Loss
from tests.helpers.classified import (
    candidates,
    slow_losses,
    some_logits,
    some_targets,
)


def test_loss_retains_the_largest_losses():
    targets = some_targets("masks")
    logits = some_logits(targets)
    expected = slow_losses(logits.double(), targets)
    found = Loss().select(candidates({"out": logits}, targets, size=6), 3)
    assert found.indices.tolist() == sorted(expected.topk(3).indices.tolist())
    assert torch.allclose(found.importance.double(), expected, atol=1e-6)
    assert found.weights is None
