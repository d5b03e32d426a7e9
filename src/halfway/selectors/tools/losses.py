"""Losses and gradients per sample, from a model's outputs and targets, for selectors that score by them.

Shapes: B batch, C classes, H x W pixels.
For dense outputs a sample is an image: its loss is the mean over its labelled pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LossFunction = Callable[[Any, Any], Tensor]

# In a mask this value is no class. Negative labels (PyTorch's -100) are no class anywhere.
IGNORE = 255
_UNLABELLED = -100


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


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """(B,) cross-entropy per sample; in segmentation the mean over the labelled pixels, 0 where there are none.

    Targets are classes (B,) or (B, H, W), or probabilities (B, C) or (B, C, H, W). Logits of another height and width
    than the masks are interpolated, as the usual losses do. In masks 255 is ignored, negative classes everywhere.
    """
    logits = logits_of(outputs)
    if logits.ndim < 2 or targets.ndim < 1 or len(logits) != len(targets):
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} and targets of shape {tuple(targets.shape)} do not belong "
            "together; say which part of the batch holds the targets (target=...), or pass a loss_fn"
        )
    if logits.shape[1] == 1:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} have a single class, of which the cross-entropy is always 0 "
            "(regression, or one logit for two classes?); pass a loss_fn"
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    dense = logits.ndim == 4
    if dense and targets.shape[-2:] != logits.shape[-2:]:
        logits = F.interpolate(logits, targets.shape[-2:], mode="bilinear", align_corners=False)
    positions = logits.shape[:1] + logits.shape[2:]
    if targets.is_floating_point():
        each = F.cross_entropy(logits, targets.to(logits).reshape(logits.shape), reduction="none")
        return each.reshape(len(each), -1).mean(1)
    if targets.numel() != positions.numel():
        raise ValueError(
            f"targets of shape {tuple(targets.shape)} do not fit logits of shape {tuple(logits.shape)}; pass a loss_fn"
        )
    classes = targets.reshape(positions).long()
    known = _known(classes, dense)
    each = F.cross_entropy(logits, torch.where(known, classes, _UNLABELLED), ignore_index=_UNLABELLED, reduction="none")
    return each.reshape(len(each), -1).sum(1) / known.reshape(len(known), -1).sum(1).clamp(min=1)


def has_label(outputs: Any, targets: Tensor) -> Tensor:
    """(B,) whether a sample has a label; in segmentation, whether any of its pixels has. Targets are classes."""
    known = _known(targets, dense=logits_of(outputs).ndim == 4)
    return known.reshape(len(known), -1).any(1)


def _known(classes: Tensor, dense: bool) -> Tensor:
    return (classes >= 0) & (classes != IGNORE) if dense else classes >= 0


def logit_gradients(outputs: Any, targets: Tensor, loss_fn: LossFunction | None = None) -> Tensor:
    """Gradient of each sample's own loss with respect to its logits, in the shape of the logits.

    The loss is the cross-entropy, or loss_fn(logits, targets) -> (B,) if given.
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
