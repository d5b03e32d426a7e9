"""From scores to a subset.

Shape suffixes: N samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..functional import highest
from ..seeds import seed_of
from .budgets import groups


def choose(
    scores: Tensor,
    keep: float,
    labels: Tensor | None = None,
    class_balance: bool = True,
    seed: int = 0,
    num_classes: int | None = None,
) -> Tensor:
    """The sorted ids of the samples with the largest scores.

    Args:
        scores: (N,), larger = retained. Infinite ones are allowed, NaN is an error.
        keep: the share to retain, in (0, 1): exactly round(keep N) samples.
        labels: (N,) classes. None: the samples are not told apart by class.
        class_balance: every class retains the same share of its samples; see `budgets.groups`.
        seed: of the order of equal scores.
        num_classes: None: the largest label plus 1.
    """
    scores_N = checked_scores(scores)
    labels_N = torch.zeros(len(scores_N), dtype=torch.int64) if labels is None else checked_labels(labels)
    if len(labels_N) != len(scores_N):
        raise ValueError(f"there are {len(scores_N)} scores and {len(labels_N)} labels; pass one of each per sample")
    classes = int(labels_N.max()) + 1 if num_classes is None else num_classes
    generator = tie_breaker(seed)
    found = [
        highest(scores_N, group.ids, group.budget, generator)
        for group in groups(labels_N, keep, classes, class_balance and labels is not None)
    ]
    return torch.cat(found).sort().values


def tie_breaker(seed: int) -> torch.Generator:
    """The generator of everything that a choice draws."""
    return torch.Generator("cpu").manual_seed(seed_of(seed, 0, 5))


def checked_scores(scores: Tensor) -> Tensor:
    """(N,) on the CPU."""
    if not isinstance(scores, Tensor) or scores.ndim != 1 or not len(scores):
        shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"scores must be a tensor with one number per sample, shape (N,), got {shape}")
    scores_N = scores.detach().cpu()
    missing_N = scores_N.isnan()
    if missing_N.any():
        raise ValueError(
            f"{int(missing_N.sum())} of {len(scores_N)} scores are NaN, for example that of sample "
            f"{int(missing_N.nonzero()[0])}; a proxy that diverged gives such scores: lower its learning rate and "
            "score again, or replace them by -inf (pruned first) or inf (retained first)"
        )
    return scores_N


def checked_labels(labels: Tensor) -> Tensor:
    """(N,) int64 on the CPU."""
    if not isinstance(labels, Tensor) or labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        shape = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"labels must be a tensor of whole numbers, one class per sample, shape (N,), got {shape}")
    labels_N = labels.detach().to("cpu", torch.int64)
    if len(labels_N) and int(labels_N.min()) < 0:
        raise ValueError(f"there is the label {int(labels_N.min())}; classes are numbered from 0")
    return labels_N
