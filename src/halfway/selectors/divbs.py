"""DivBS: samples whose gradients together make up most of the batch's mean gradient.

Shape suffixes: B batch, S retained, C classes, D features, X positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from .base import Candidates, OutputRanking, Selection
from .tools.last_layer import channels_first, last_linear, width_of
from .tools.losses import LossFunction, logit_gradients

Pick = Literal["largest", "drawn"]

# An inner product in float64 below this share of its largest possible value counts as a rounding error.
_ROUNDING = 1e-10
# A random waiting time of 0 would win against any other.
_SOONEST = 1e-300
# Columns that are converted to float64 at a time.
_PART = 1 << 16
_POOLING: dict[int, Callable[..., Tensor]] = {
    3: F.adaptive_avg_pool1d,
    4: F.adaptive_avg_pool2d,
    5: F.adaptive_avg_pool3d,
}


class DivBS(OutputRanking):
    """Diversified batch selection: picks, one by one, the sample that explains most of what is not explained yet.

    What: g_i is the gradient of the i-th sample's loss with respect to the model's last linear layer (without bias),
        the outer product of the gradient for the logits and of what enters the layer. Starting from the mean of all g,
        the sample with the largest |<g_i, residual>| is retained, and the direction that its g adds to the span of
        those retained before is removed from the residual; S times. Samples whose gradients repeat each other are
        pruned. Once nothing is left of the residual, the remaining picks are drawn at random.
    Source: Hong et al., "Diversified Batch Selection for Training Acceleration", ICML 2024. pick="largest", the
        default, is the paper's text; pick="drawn" is what their public code does: it draws the next sample in
        proportion to |<g_i, residual>|. At p = 0.3 / 0.5 / 0.7 the samples that "largest" retains had 0.87 / 0.74 /
        0.54 in common with those of their code, and were harder. Their code computes gradients in eval mode; ours come
        from the forward pass of training itself.
    Cost: the forward pass of all samples, see `OutputRanking`, and O(B^2 (C + D) + B S^2) for the choice, in
        inner products: no gradient is ever materialised (dense outputs: (B, C, D) numbers are).
    Caveats: the S picks run one after the other, each a dozen small kernels. Prefers large gradients. Dense outputs:
        g_i is the sum over positions, with the gradient for the logits averaged to the resolution of the layer's
        input. Many positions but one prediction (tokens, pooling after the last layer): the mean over positions is
        used. If the model does not end in a linear layer or a 1 x 1 convolution with an output per class, only the
        gradients for the logits are compared, which without positions span at most C - 1 directions.

    Args:
        pick: which sample comes next: the one with the "largest" |<g_i, residual>| (default), or one "drawn" in
            proportion to it.
        loss_fn: loss_fn(logits, targets) -> (B,), differentiable; None: cross-entropy.
        target: see `Selector`.
    """

    name = "divbs"

    def __init__(
        self, pick: Pick = "largest", loss_fn: LossFunction | None = None, target: int | str | None = None
    ) -> None:
        super().__init__(loss_fn, target)
        if pick not in get_args(Pick):
            raise ValueError(f"unknown pick {pick!r}; choose one of {get_args(Pick)}")
        self.pick: Pick = pick
        self._layer: nn.Module | None = None

    def watches(self, root: nn.Module) -> nn.Module | None:
        self._layer = last_linear(root)
        return self._layer

    def select(self, candidates: Candidates, count: int) -> Selection:
        delta = logit_gradients(candidates.outputs, candidates.targets, self.loss_fn)
        gram_BB = inner_products(delta, self._input_of_last_layer(candidates.watched, delta))
        size_B = gram_BB.diagonal()
        self.finite_or_random(size_B, candidates)
        # If there is nothing to explain, all are drawn at random.
        gram_BB = torch.where(functional.all_finite(size_B), gram_BB, 0.0)
        return Selection(greedy(gram_BB, count, candidates.generator, self.pick).sort().values)

    def _input_of_last_layer(self, watched: Tensor | None, delta: Tensor) -> Tensor | None:
        """(B, D, positions ...); None if the watched input does not belong to these logits."""
        if watched is None or (self._layer is not None and width_of(self._layer) != delta.shape[1]):
            return None
        return channels_first(watched, self._layer)


def inner_products(delta: Tensor, h: Tensor | None) -> Tensor:
    """(B, B) float64: <g_i, g_j> with g_i = sum over positions of delta_i (x) h_i.

    Args:
        delta: (B, C, positions ...), gradients for the logits.
        h: (B, D, positions ...), what enters the last layer; None: g_i = delta_i, with all its positions.
    """
    if h is None:
        return _gram(delta.flatten(1))
    if delta.ndim == 2 or delta.ndim != h.ndim:
        # No positions, or positions that do not match. One prediction from many positions uses their mean; many
        # predictions from one position add up.
        delta_BC = delta if delta.ndim == 2 else delta.flatten(2).sum(2)
        h_BD = h if h.ndim == 2 else h.flatten(2).mean(2)
        return _gram(delta_BC) * _gram(h_BD)
    if delta.shape[2:] != h.shape[2:]:
        # The adjoint of interpolation, up to a constant.
        delta = _POOLING[delta.ndim](delta, h.shape[2:])
    return _gram(torch.einsum("bcx,bdx->bcd", delta.flatten(2), h.flatten(2).to(delta)).flatten(1))


def greedy(gram_BB: Tensor, count: int, generator: torch.Generator, pick: Pick = "largest") -> Tensor:
    """(S,) rows in the order in which they are picked, from inner products of gradients (B, B).

    With e_1, e_2, ... the orthonormal directions picked so far, it keeps <g_i, e_t>, <g_i, residual> and the squared
    norm of the part of g_i outside their span up to date: all that the choice depends on. `pick` is that of `DivBS`.
    """
    B = len(gram_BB)
    chance_B = torch.rand(B, generator=generator, device=gram_BB.device, dtype=gram_BB.dtype)
    along_BS = gram_BB.new_zeros(B, count)
    towards_B = gram_BB.mean(1)
    size_B = gram_BB.diagonal()
    outside_B = size_B.clone()
    picked_B = torch.zeros(B, dtype=torch.bool, device=gram_BB.device)
    # <g_i, residual> never exceeds the product of their initial norms.
    negligible_B = _ROUNDING * (size_B * gram_BB.mean()).clamp_min(0).sqrt()
    rows = []
    for t in range(count):
        # Within the span <g_i, residual> is zero up to rounding.
        counts_B = ~picked_B & (outside_B > _ROUNDING * size_B) & (towards_B.abs() > negligible_B)
        going_on = counts_B.any()
        weight_B = towards_B.abs()
        if pick == "drawn":
            # Of exponential waiting times with these rates, the shortest is a draw in proportion to the rates.
            uniform_B = torch.rand(B, generator=generator, device=gram_BB.device, dtype=gram_BB.dtype)
            weight_B = weight_B / -torch.log1p(-uniform_B).clamp_max(-_SOONEST)
        score_B = torch.where(going_on, torch.where(counts_B, weight_B, 0.0), chance_B)
        score_B = score_B.masked_fill(picked_B, -1.0)
        row = score_B.argmax(0, keepdim=True)
        new_B = gram_BB.index_select(1, row).squeeze(1)
        new_B = new_B - along_BS[:, :t] @ along_BS[:, :t].index_select(0, row).squeeze(0)
        scale = torch.where(going_on, outside_B.index_select(0, row).rsqrt(), 0.0)
        new_B = new_B * scale
        towards_B = towards_B - new_B * (towards_B.index_select(0, row) * scale)
        outside_B = outside_B - new_B.square()
        along_BS[:, t] = new_B
        picked_B.index_fill_(0, row, True)
        rows.append(row)
    return torch.cat(rows)


def _gram(vectors: Tensor) -> Tensor:
    """(B, ...) to (B, B) float64, in pieces: a float64 copy of dense outputs would be large."""
    gram_BB = vectors.new_zeros(len(vectors), len(vectors), dtype=torch.float64)
    for part in vectors.split(_PART, 1):
        part = part.to(torch.float64)
        gram_BB += part @ part.T
    return gram_BB
