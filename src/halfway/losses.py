"""Losses and gradients per sample, from a model's outputs and targets: what the batch-wise rivals score by.

Shape suffixes: B batch, C classes, X pixels (one for classification).
For dense outputs a sample is an image: its loss is the mean over its labelled pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LossFunction = Callable[[Any, Any], Tensor]

# In a mask: no class. Negative labels (PyTorch's -100) never are one.
IGNORE = 255


def logits_of(outputs: Any) -> Tensor:
    """The logits among a model's outputs: the tensor itself, "logits" or "out" of a mapping, the first of a tuple."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        for name in ("logits", "out"):
            if isinstance(outputs.get(name), Tensor):
                return outputs[name]
    if isinstance(outputs, (tuple, list)) and outputs and isinstance(outputs[0], Tensor):
        return outputs[0]
    raise TypeError(
        f"no logits among the model's outputs, a {type(outputs).__name__}; pass the selector a "
        "loss_fn(outputs, targets) that returns one loss per sample"
    )


def labelled(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (B, C, X) float32 and targets as probabilities (B, C, X), and which pixels are labelled (B, X).

    Targets are classes (B,) or (B, H, W), or probabilities (B, C) or (B, C, H, W). Logits of another height and width
    than the masks are interpolated, as the usual losses do. In masks 255 is ignored, negative classes everywhere.
    """
    if logits.ndim < 2 or targets.ndim < 1 or len(logits) != len(targets):
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} and targets of shape {tuple(targets.shape)} do not belong "
            "together; say which part of the batch holds the targets (target=...), or pass a loss_fn"
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    dense = logits.ndim == 4
    if dense and targets.shape[-2:] != logits.shape[-2:]:
        logits = F.interpolate(logits, targets.shape[-2:], mode="bilinear", align_corners=False)
    logits_BCX = logits.flatten(2) if logits.ndim > 2 else logits.unsqueeze(2)
    B, C, X = logits_BCX.shape
    if targets.is_floating_point():
        probabilities = targets.to(logits_BCX).reshape(B, C, X)
        return logits_BCX, probabilities, torch.ones(B, X, dtype=torch.bool, device=logits.device)
    classes_BX = targets.reshape(B, -1)
    if classes_BX.shape[1] != X:
        raise ValueError(
            f"targets of shape {tuple(targets.shape)} do not fit logits of shape {tuple(logits.shape)}; pass a loss_fn"
        )
    known_BX = classes_BX >= 0
    if dense:
        known_BX = known_BX & (classes_BX != IGNORE)
    one_hot = F.one_hot(classes_BX.clamp(0, C - 1).long(), C).movedim(2, 1).to(logits_BCX)
    return logits_BCX, one_hot, known_BX


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """(B,) cross-entropy per sample; in segmentation the mean over the labelled pixels, 0 where there are none."""
    logits_BCX, probabilities_BCX, known_BX = labelled(logits_of(outputs), targets)
    each_BX = -(probabilities_BCX * logits_BCX.log_softmax(1)).sum(1)
    return (each_BX * known_BX).sum(1) / known_BX.sum(1).clamp(min=1)


def logit_gradients(outputs: Any, targets: Tensor, loss_fn: LossFunction | None = None) -> Tensor:
    """Gradient of each sample's own loss with respect to its logits, in the shape of the logits.

    Without a `loss_fn` that of the cross-entropy; one of your own is called as loss_fn(logits, targets) -> (B,).
    """
    with torch.enable_grad():
        logits = logits_of(outputs).detach().float().requires_grad_()
        losses_B = (loss_fn or cross_entropy)(logits, targets)
        return torch.autograd.grad(losses_B.sum(), logits)[0]


def per_sample(losses: Tensor, size: int, source: str) -> Tensor:
    """`losses`, if they are one per sample; otherwise an error."""
    if not isinstance(losses, Tensor) or losses.shape != (size,):
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise ValueError(
            f"{source} must be one loss per sample, shape ({size},), got {found}; use reduction='none', and in "
            "segmentation the mean over the pixels of each image"
        )
    return losses
