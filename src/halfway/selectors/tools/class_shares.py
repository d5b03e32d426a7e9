"""Targets of any usual kind as one probability per class.

Shape suffixes: B batch, C classes, P pixels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .losses import IGNORE

# How far from 1 the sum of a sample's probabilities may be: half precision rounds them.
_ROUNDING = 0.02


class ClassShares(NamedTuple):
    """What the targets of a batch say.

    shares_BC: probabilities, float32; zeros in rows without a label.
    labelled_B: bool.
    wrong: () bool, on the device: there is a class beyond the last one, or a row that is no distribution. They count as
        not labelled.
    """

    shares_BC: Tensor
    labelled_B: Tensor
    wrong: Tensor


class Classes(NamedTuple):
    """One class per sample.

    classes_B: int64; negative without a label.
    wrong: () bool, on the device: there is a row of numbers that is no distribution. Then no sample has a label.
    """

    classes_B: Tensor
    wrong: Tensor


def largest_class(targets: Any, size: int, device: torch.device) -> Classes | None:
    """Of classes (B,), or of probabilities (B, C), of which the largest counts; None for other targets (masks,
    regression)."""
    if not isinstance(targets, Tensor) or targets.ndim not in (1, 2) or len(targets) != size:
        return None
    if targets.is_complex() or targets.is_floating_point() != (targets.ndim == 2) or targets.shape[1:] == (1,):
        return None
    targets = targets.detach().to(device, non_blocking=True)
    if targets.ndim == 1:
        return Classes(targets.long(), torch.zeros((), dtype=torch.bool, device=device))
    shares_BC = targets.to(torch.float32)
    wrong = ~_distributions(shares_BC).all()
    return Classes(torch.where(wrong, -1, shares_BC.argmax(1)), wrong)


def class_shares(targets: Any, size: int, classes: int, device: torch.device) -> ClassShares | None:
    """Of classes (B,), probabilities (B, C), or masks (B, H, W), of which the shares of the labelled pixels count; None
    for other targets. Negative classes are no label, nor is 255 in masks."""
    if not isinstance(targets, Tensor) or targets.ndim not in (1, 2, 3) or len(targets) != size:
        return None
    targets = targets.detach().to(device, non_blocking=True)
    if targets.ndim == 2:
        if not targets.is_floating_point() or targets.shape[1] != classes:
            return None
        shares_BC = targets.to(torch.float32)
        right_B = _distributions(shares_BC)
        return ClassShares(torch.where(right_B.unsqueeze(1), shares_BC, 0.0), right_B, ~right_B.all())
    if targets.is_floating_point() or targets.is_complex():
        return None
    classes_BP = targets.reshape(size, -1).long()
    labelled_BP = classes_BP >= 0
    if targets.ndim == 3:
        labelled_BP = labelled_BP & (classes_BP != IGNORE)
    beyond_BP = labelled_BP & (classes_BP >= classes)
    labelled_BP = labelled_BP & ~beyond_BP
    # Flat, because along one axis a GPU can add in a fixed order, if it is told to.
    places_BP = torch.where(labelled_BP, classes_BP, 0) + classes * torch.arange(size, device=device).unsqueeze(1)
    counts = torch.zeros(size * classes, device=device, dtype=torch.float32)
    counts.scatter_add_(0, places_BP.flatten(), labelled_BP.flatten().to(torch.float32))
    number_B = labelled_BP.sum(1)
    shares_BC = counts.reshape(size, classes) / number_B.clamp_min(1).unsqueeze(1)
    return ClassShares(shares_BC, number_B > 0, beyond_BP.any())


def _distributions(shares_BC: Tensor) -> Tensor:
    """(B,) bool: which rows are probabilities that add up to 1; False for NaN."""
    return (shares_BC >= 0).all(1) & ((shares_BC.sum(1) - 1).abs() <= _ROUNDING)
