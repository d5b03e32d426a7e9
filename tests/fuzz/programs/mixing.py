"""Steps in which samples see each other, or change places.

Reductions over the batch that flow back are documented to be computed from the retained samples, and so is everything
behind them. Some are dormant (a limit that is not reached, a capacity that is not exceeded), some of these only at
first, and some appear in a later step: no comparison of values in the first step can show them.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .base import CHANNELS, Step


def centre(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True)


def standardise(x: Tensor) -> Tensor:
    """BatchNorm by hand."""
    mean = x.mean((0, 2, 3), keepdim=True)
    variance = (x - mean).square().mean((0, 2, 3), keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-2)


def divide_by_maximum(x: Tensor) -> Tensor:
    return x / (x.abs().amax() + 0.1)


def divide_by_fixed_maximum(x: Tensor) -> Tensor:
    return x / (x.detach().abs().amax() + 0.1)


def divide_by_norm(x: Tensor) -> Tensor:
    return 3 * x / (x.norm() + 0.1)


def divide_by_maximum_in_place(x: Tensor) -> Tensor:
    x = x * 1.0
    x /= x.detach().abs().amax() + 0.1
    return x


def floor_below_maximum(x: Tensor) -> Tensor:
    """As log-mel front ends do."""
    return torch.maximum(x, x.detach().amax() - 3.0)


def clamp_to_extremes(x: Tensor) -> Tensor:
    return x.clamp(0.8 * x.detach().amin(), 0.8 * x.detach().amax())


def softmax(x: Tensor) -> Tensor:
    return 3 * x.softmax(0)


def logsumexp(x: Tensor) -> Tensor:
    return x - x.logsumexp(0, keepdim=True)


def minus_first(x: Tensor) -> Tensor:
    return x - 0.5 * x[:1]


def minus_neighbour(x: Tensor) -> Tensor:
    return torch.cat([x[:1], x[1:] - 0.5 * x[:-1]])


def median(x: Tensor) -> Tensor:
    return x - x.median(0, keepdim=True).values


def quantile(x: Tensor) -> Tensor:
    return x - torch.quantile(x.detach(), 0.75, dim=0, keepdim=True)


def sort(x: Tensor) -> Tensor:
    return x + 0.3 * x.sort(0).values


def topk(x: Tensor) -> Tensor:
    return x - 0.3 * x.flatten(1).mean(1).topk(1).values.view(1, 1, 1, 1)


def cumsum(x: Tensor) -> Tensor:
    return x + 0.1 * x.cumsum(0).tanh()


def cummax(x: Tensor) -> Tensor:
    return x + 0.3 * x.cummax(0).values


def strongest(x: Tensor) -> Tensor:
    return x + 0.3 * x.index_select(0, x.detach().mean((1, 2, 3)).argmax().view(1))


def similar(x: Tensor) -> Tensor:
    flat = x.flatten(1)
    return ((flat @ flat.T).softmax(1) @ flat).view_as(x)


def distances(x: Tensor) -> Tensor:
    flat = x.flatten(1)
    return ((-torch.cdist(flat, flat)).softmax(1) @ flat).view_as(x)


def covariance(x: Tensor) -> Tensor:
    flat = x.flatten(1)
    return x + 0.3 * (flat @ (flat.T @ flat) / len(x)).tanh().view_as(x)


def einsum(x: Tensor) -> Tensor:
    return x + 0.3 * torch.einsum("nchw,mchw,mdhw->ndhw", x, x, x).tanh() / len(x)


def ranks(x: Tensor) -> Tensor:
    """Scaled by each sample's place in the order of the batch."""
    place = x.detach().mean((1, 2, 3)).argsort().argsort()
    return x * (1 + 0.1 * place.view(-1, 1, 1, 1))


def by_length(x: Tensor) -> Tensor:
    """Padding to the longest of the batch: what lies behind it is zero for all."""
    inside = x.detach().abs().mean((0, 1, 2)) > 0.05
    return x * inside.to(x.dtype)


_SMOOTH = [centre, standardise, divide_by_fixed_maximum, divide_by_norm, divide_by_maximum_in_place, softmax]
_SMOOTH += [logsumexp, minus_first, minus_neighbour, similar, covariance]
_ROUGH = [divide_by_maximum, floor_below_maximum, clamp_to_extremes, median, quantile, sort, topk, cumsum, cummax]
_ROUGH += [strongest, distances, einsum, ranks, by_length]
MIXERS: dict[str, Callable[[Tensor], Tensor]] = {f.__name__: f for f in (*_SMOOTH, *_ROUGH)}


class Mixing(Step):
    """A reduction over the batch that flows back; from its `since`-th call on."""

    KINDS = tuple(MIXERS)

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.since = rng.choice([0, 0, 0, 1, 2])
        self.calls = 0
        self.rough = MIXERS[self.kind] in _ROUGH

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls <= self.since:
            return x
        self.mixes()
        return MIXERS[self.kind](x)


class Dormant(Step):
    """A reduction over the batch that changes nothing, most of the time or at first."""

    KINDS = ("limit", "falling_limit", "observer", "capacity", "half_capacity", "zero", "not_finite")
    rough = True

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.limit = {"limit": rng.choice([2.5, 100.0]), "falling_limit": 100.0}.get(self.kind, 0.0)
        self.calls = 0
        self.expert = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.register_buffer("low", torch.tensor(-1.0))
        self.register_buffer("high", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        self.mixes()
        if self.kind in ("limit", "falling_limit"):
            largest = x.abs().amax()
            limit = self.limit / 6**self.calls if self.kind == "falling_limit" else self.limit
            self.calls += 1
            return torch.where(largest > limit, x / (largest + 0.1), x)
        if self.kind == "observer":
            return self._quantise(x)
        if self.kind == "zero":
            return x + 0 * x.mean()
        if self.kind == "not_finite":
            return torch.where(x.isinf().any(), x.clamp(-1e4, 1e4), x)
        # A sample goes to the expert if it wants to, and if there is room for it.
        wants = x.detach().mean((1, 2, 3)) > 0.02
        room = len(x) + 1 if self.kind == "capacity" else (len(x) + 1) // 2
        goes = wants & (wants.cumsum(0) <= room)
        return torch.where(goes.view(-1, 1, 1, 1), self.expert(x), x)

    def _quantise(self, x: Tensor) -> Tensor:
        """As in quantisation-aware training: an observer of extremes, and a rounding that gradients pass."""
        with torch.no_grad():
            self.low.copy_(torch.minimum(self.low, x.amin()))
            self.high.copy_(torch.maximum(self.high, x.amax()))
        scale = (self.high - self.low) / 255
        levels = ((x - self.low) / scale).round() * scale + self.low
        return x + (levels - x).detach()


class Reorder(Step):
    """Samples change places, at times with those of the batch, at times only for a while."""

    KINDS = ("roll", "flip", "index", "gather", "shuffle", "mixup", "fold", "by_value", "there_and_back", "sorted")

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.rough = self.kind in ("by_value", "sorted")

    def forward(self, x: Tensor) -> Tensor:
        self.mixes()
        n = len(x)
        if self.kind == "roll":
            return 0.5 * x + 0.5 * x.roll(1, 0)
        if self.kind == "flip":
            return x.flip(0)
        if self.kind == "index":
            return x[torch.arange(n - 1, -1, -1)]
        if self.kind == "gather":
            return x.gather(0, (torch.arange(n) + 1).remainder(n).view(-1, 1, 1, 1).expand_as(x))
        if self.kind == "shuffle":
            return x[self.drawn(lambda: torch.randperm(n)).argsort().argsort()]
        if self.kind == "mixup":
            order = self.drawn(lambda: torch.rand(n)).argsort()
            return 0.7 * x + 0.3 * x[order]
        if self.kind == "fold":  # pairs neighbours: (2 N) is taken apart as (N, 2)
            return x.repeat(2, 1, 1, 1).unflatten(0, (n, 2)).mean(1)
        if self.kind == "there_and_back":
            return self.conv(x.flip(0)).flip(0)
        order = x.detach().mean((1, 2, 3)).argsort()
        if self.kind == "by_value":
            return x[order]
        return self.conv(x[order])[order.argsort()]


class Length(Step):
    """The batch's length enters, from the `since`-th call on, or a sample's position in it. Both count as something
    that a sample has from the others."""

    KINDS = ("factor", "tensor", "positions", "if_long")

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.since = rng.choice([0, 1, 2])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        long = self.calls > self.since
        if long and self.kind != "if_long":  # there the same choice may be made for all and for some samples
            self.mixes()
        if self.kind == "factor":
            return x * (2 / len(x) ** 0.5 if long else 1.0)
        if self.kind == "tensor":
            return x * (torch.ones(len(x) if long else 4, dtype=x.dtype).sum().rsqrt() * 2)
        if self.kind == "positions":
            if not long:
                return x
            return x * (1 + 0.1 * torch.arange(len(x), dtype=x.dtype).view(-1, 1, 1, 1))
        return x * 2 if long and len(x) > 4 else x
