"""Importance sampling by the size of each sample's gradient, with the weights that make it unbiased."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Candidates, OutputRanking, Selection
from .tools.draw import inclusion_probabilities, systematic
from .tools.losses import LossFunction, logit_gradients


class GradNorm(OutputRanking):
    """Draw samples in proportion to (an upper bound of) the norm of their gradient, and weigh their losses.

    What: G_i is the norm of the gradient of the i-th sample's loss with respect to its logits; up to a constant it
        bounds the norm of the gradient with respect to all weights. Of B samples S are drawn without replacement,
        the i-th with probability pi_i proportional to (1 - uniform) G_i / mean(G) + uniform (at most 1), and
        `blocker.last.weights` holds S / (B pi_i): the mean of weights * losses over the retained is an unbiased
        estimate of the mean loss of the whole batch (Horvitz & Thompson 1952), and so is its gradient.
    Source: Katharopoulos & Fleuret, "Not All Samples Are Created Equal: Deep Learning with Importance Sampling", ICML
        2018. They draw with replacement, from a larger batch loaded for the purpose, and only once a running estimate
        of the variance says that it pays. Here each sample is drawn at most once (systematic sampling), from the batch
        itself, in every step.
    Cost: the forward pass of all samples, see `OutputRanking`.
    Caveats: without the weights, `(losses * blocker.last.weights).mean()`, this is not importance sampling but a
        preference for large gradients. Steps that prune nothing have `blocker.last` None.

    Args:
        uniform: share of uniform sampling, in [0, 1]: no weight exceeds 1 / uniform. The bound only holds for the loss
            it was computed from; label smoothing or an auxiliary loss on top gives gradients to samples whose G is 0,
            and with uniform=0 also weights of up to a million. The default is ours.
        loss_fn: loss_fn(logits, targets) -> (B,), differentiable; None: cross-entropy.
        target: see `Selector`.
    """

    name = "grad_norm"

    def __init__(
        self, uniform: float = 0.1, loss_fn: LossFunction | None = None, target: int | str | None = None
    ) -> None:
        super().__init__(loss_fn, target)
        if not 0 <= uniform <= 1:
            raise ValueError(f"uniform is a share of the sampling and must be in [0, 1], got {uniform}")
        self.uniform = uniform

    def importance(self, candidates: Candidates) -> Tensor:
        """(B,) float64: G."""
        gradients = logit_gradients(candidates.outputs, candidates.targets, self.loss_fn)
        return gradients.flatten(1).norm(dim=1).to(torch.float64)

    def select(self, candidates: Candidates, count: int) -> Selection:
        norms_B = self.finite_or_random(self.importance(candidates), candidates)
        relative_B = norms_B / norms_B.mean().clamp_min(torch.finfo(torch.float64).tiny)
        pi_B = inclusion_probabilities((1 - self.uniform) * relative_B + self.uniform, count)
        rows_S = systematic(pi_B, count, candidates.generator)
        weights_S = count / (candidates.size * pi_B.index_select(0, rows_S))
        return Selection(rows_S, norms_B.float(), weights_S.float())
