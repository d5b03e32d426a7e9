"""Outputs and targets of classifiers, as candidates of a selector, and their losses one sample at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from halfway.selectors import Candidates
from tests.helpers.draws import generator

CLASSES = 5

KINDS = ["classes", "ignored classes", "soft", "masks"]


def candidates(outputs, targets=None, seed=0, size=None, **others):
    source = seed if isinstance(seed, torch.Generator) else generator(seed)
    return Candidates(len(outputs) if size is None else size, source, outputs=outputs, targets=targets, **others)


def as_losses(outputs, targets):
    """A loss function for tests that think in losses: the outputs are the losses."""
    return outputs


def some_targets(kind, size=6):
    source = generator(1)
    classes = torch.randint(CLASSES, (size,), generator=source)
    if kind == "classes":
        return classes
    if kind == "ignored classes":
        return torch.where(torch.arange(size) == 2, -100, classes)
    if kind == "soft":
        return torch.rand(size, CLASSES, generator=source).softmax(1)
    masks = torch.randint(CLASSES, (size, 4, 6), generator=source)
    masks[0, :2] = 255
    masks[1, 0, 0] = -100
    masks[3] = 255  # an image without labels
    return masks


def some_logits(targets, seed=0):
    positions = targets.shape[1:] if targets.ndim == 3 else ()
    return torch.randn(len(targets), CLASSES, *positions, generator=generator(seed))


def slow_losses(logits, targets):
    """One sample at a time, by PyTorch's own function, in the precision of the logits."""
    losses = []
    for row, target in zip(logits, targets, strict=True):
        if target.is_floating_point():
            losses.append(F.cross_entropy(row[None], target[None].to(row)))
        else:
            target = torch.where(target == 255, -100, target) if target.ndim else target
            if (target < 0).all():
                losses.append(row.sum() * 0)
            else:
                losses.append(F.cross_entropy(row[None], target[None]))
    return torch.stack(losses)


def skewed_batch(size=12, sharpness=3.0):
    """Most samples are classified well, two are not."""
    logits = sharpness * torch.randn(size, CLASSES, generator=generator())
    targets = logits.argmax(1)
    targets[:2] = logits[:2].argmin(1)
    return logits, targets


def history_of(selector):
    """The losses that Selective-Backprop remembers."""
    return selector.state_dict()["losses"]
