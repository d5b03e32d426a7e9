"""What the selectors have in common that look at the model's outputs: losses per sample, and where targets are.

They pay the forward pass of all samples: at p pruned a step costs (1 - p) + p F/T with F the *whole* forward, about a
third of a training step T. Only the backward pass of the pruned samples is saved.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .base import Candidates, Ranking
from .tools.losses import LossFunction, cross_entropy, per_sample


class OutputRanking(Ranking):
    """Base class: ranks by something computed from outputs and targets.

    Args:
        loss_fn: loss_fn(outputs, targets) -> (B,), one loss per sample; None: cross-entropy, in segmentation the mean
            over an image's labelled pixels.
        target: which part of the batch holds the targets, see `Selector`.
    """

    needs = "outputs"
    wants_targets = "required"

    def __init__(self, loss_fn: LossFunction | None = None, target: int | str | None = None) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.target = target

    def losses(self, candidates: Candidates) -> Tensor:
        """(B,) float32, one loss per sample."""
        if self.loss_fn is None:
            return cross_entropy(candidates.outputs, candidates.targets).float()
        found = self.loss_fn(candidates.outputs, candidates.targets)
        return per_sample(found, candidates.size, "what loss_fn returns").float()

    def config(self) -> dict[str, Any]:
        name = getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)
        return {"loss_fn": None if self.loss_fn is None else name, "target": self.target}
