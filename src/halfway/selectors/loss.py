"""Retains the samples with the largest training loss."""

from __future__ import annotations

from torch import Tensor

from .base import Candidates, OutputRanking


class Loss(OutputRanking):
    """Ordered SGD: train on the samples of the batch with the largest loss.

    What: the S largest losses stay; the mean of them is Ordered SGD's objective.
    Source: Kawaguchi & Lu, "Ordered SGD", AISTATS 2020.
    Cost: the forward pass of all samples, see `OutputRanking`.
    Caveats: prefers outliers and wrong labels; the mean of the retained losses is not that of the batch.

    Args:
        loss_fn, target: see `OutputRanking`.
    """

    name = "loss"

    def importance(self, candidates: Candidates) -> Tensor:
        return self.losses(candidates)
