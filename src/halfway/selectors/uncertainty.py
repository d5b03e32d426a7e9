"""Retains the least certain predictions. Does not look at targets."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from .base import Candidates, Ranking
from .tools.losses import logits_of

Measure = Literal["entropy", "least_confidence", "margin"]


class Uncertainty(Ranking):
    """Train on the samples the model is least certain about, whatever their labels say.

    What: with q the softmax of a sample's logits and q1 >= q2 its two largest values, the importance is the entropy
        -sum_c q_c log q_c, or 1 - q1 ("least_confidence"), or 1 - (q1 - q2) ("margin"). Dense outputs (B, C, H, W):
        the mean over all pixels, labelled or not.
    Source: the uncertainty scores of Coleman et al., "Selection via Proxy: Efficient Data Selection for Deep Learning",
        ICLR 2020. They take the scores from a small proxy model and choose once, before training; here they are the
        model's own, batch by batch.
    Cost: the forward pass of all samples, see `OutputRanking`.
    Caveats: a confident error (the largest loss of all) is pruned; the mean of the retained losses is not that of the
        batch.

    Args:
        measure: "entropy" (default), "least_confidence" or "margin".
    """

    name = "uncertainty"
    needs = "outputs"

    def __init__(self, measure: Measure = "entropy") -> None:
        if measure not in get_args(Measure):
            raise ValueError(f"unknown measure {measure!r}; choose one of {get_args(Measure)}")
        self.measure = measure

    def importance(self, candidates: Candidates) -> Tensor:
        logits = logits_of(candidates.outputs)
        if logits.ndim < 2 or logits.shape[1] < 2:
            raise ValueError(
                f"uncertainty is measured over two classes or more, in the second dimension of the outputs, which have "
                f"the shape {tuple(logits.shape)}; choose another selector"
            )
        q_BCX = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(1)
        q_BCX = q_BCX.reshape(*logits.shape[:2], -1)
        if self.measure == "entropy":
            return torch.special.entr(q_BCX).sum(1).mean(1)
        # 1 - q1 as the sum of the others, which is exact even where q1 rounds to 1.
        others_BCX = q_BCX.scatter(1, q_BCX.argmax(1, keepdim=True), 0.0)
        doubt_BX = others_BCX.sum(1)
        if self.measure == "margin":
            doubt_BX = doubt_BX + others_BCX.amax(1)
        return doubt_BX.mean(1)
