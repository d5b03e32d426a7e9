"""What logits and labels say about a sample. Pure functions.

Shape suffixes: B samples, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def errors(logits_BC: Tensor, labels_B: Tensor) -> Tensor:
    """(B, C) p - y, the softmax minus the one-hot label: the gradient of the cross-entropy for the logits."""
    logits_BC = logits_BC.to(torch.promote_types(logits_BC.dtype, torch.float32))
    errors_BC = logits_BC.softmax(1)
    # p - 1 as minus the sum of the others, which is exact even where p rounds to 1.
    true_B1 = labels_B.unsqueeze(1)
    errors_BC = errors_BC.scatter(1, true_B1, 0.0)
    return errors_BC.scatter(1, true_B1, -errors_BC.sum(1, keepdim=True))


def margins(logits_BC: Tensor, labels_B: Tensor) -> Tensor:
    """(B,) the true logit minus the largest other logit; positive if the prediction is right."""
    logits_BC = logits_BC.to(torch.promote_types(logits_BC.dtype, torch.float32))
    true_B1 = labels_B.unsqueeze(1)
    others_BC = logits_BC.scatter(1, true_B1, -torch.inf)
    return logits_BC.gather(1, true_B1).squeeze(1) - others_BC.amax(1)
