"""How many samples each class may retain.

Shape suffixes: N samples, C classes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..settings import number

_MIXED = "class_balance=False (`halfway coreset --no-class-balance`) with a method that scores samples"


class Group(NamedTuple):
    """Samples that share a budget: those of one class, or all."""

    ids: Tensor  # sorted
    budget: int  # how many of them are retained


def share_to_keep(keep: float) -> float:
    """`keep` as a float in (0, 1)."""
    found = number("keep", keep)
    if not 0 < found < 1:
        raise ValueError(
            f"keep is the share of the samples to retain and must lie between 0 and 1, got {keep}; a pruning ratio p "
            "is keep=1-p, and for all samples no subset is needed"
        )
    return found


def groups(labels_N: Tensor, keep: float, num_classes: int, class_balance: bool = True) -> list[Group]:
    """One group per class, with budgets that add up to exactly round(keep N); without class balance one group of all.

    A class of n samples gets keep n, rounded down, and what is then missing goes to the classes with the largest
    fractions, among equal ones to those with the lowest number. No class is left with nothing: it gets one sample from
    the class with the largest budget.
    """
    keep = share_to_keep(keep)
    total = _total(len(labels_N), keep)
    if not class_balance:
        return [Group(torch.arange(len(labels_N), device="cpu"), total)]
    sizes = class_sizes(labels_N, num_classes)
    if total < num_classes:
        raise ValueError(
            f"keep={keep} of {len(labels_N)} samples is {total}, fewer than the {num_classes} classes; take keep of at "
            f"least {math.ceil(1000 * num_classes / len(labels_N)) / 1000}, or {_MIXED}"
        )
    counts = shares([keep * size for size in sizes], total)
    by_class = labels_N.argsort(stable=True).split(sizes)
    return [Group(ids, count) for ids, count in zip(by_class, counts, strict=True)]


def class_sizes(labels_N: Tensor, num_classes: int) -> list[int]:
    """The number of samples of each class; none may be missing."""
    if len(labels_N) < num_classes:
        raise ValueError(
            f"there are {len(labels_N)} samples of {num_classes} classes, fewer samples than classes; pass the labels "
            "of the whole training set, and classes numbered from 0"
        )
    sizes: list[int] = torch.bincount(labels_N, minlength=num_classes).tolist()
    missing = [c for c, size in enumerate(sizes) if not size]
    if missing:
        raise ValueError(
            f"{len(missing)} of {num_classes} classes have no sample, for example class {missing[0]}; number the "
            f"classes that there are from 0 without gaps, or {_MIXED}"
        )
    return sizes


def _total(num_samples: int, keep: float) -> int:
    total = round(keep * num_samples)
    if not total:
        raise ValueError(f"keep={keep} of {num_samples} samples is none; take a larger keep")
    return total


def shares(exact: list[float], total: int) -> list[int]:
    """Whole numbers, at least 1 each, that add up to `total`: rounded down, what is then missing to the largest
    fractions."""
    counts = [math.floor(share) for share in exact]
    fractions = sorted(range(len(exact)), key=lambda c: (counts[c] - exact[c], c))
    for c in fractions[: total - sum(counts)]:
        counts[c] += 1
    for c in range(len(exact)):
        if not counts[c]:
            counts[max(range(len(exact)), key=lambda other: counts[other])] -= 1
            counts[c] = 1
    return counts
