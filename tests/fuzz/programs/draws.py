"""Steps that draw random numbers: every operation of PyTorch that does, in several shapes, some from an own generator.

In a replay each sample has the draw it had in the first pass. Operations that draw inside (dropout and its kin) are
taken apart for that: with the draw fixed, they are affine in their input, and two calls show how.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import CHANNELS, Step

Own = torch.Generator | None


def _empty(s: torch.Size) -> Tensor:
    return torch.empty(s)


def _half(s: torch.Size) -> Tensor:
    return torch.full(s, 0.5)


def _multinomial(s: torch.Size, g: Own) -> Tensor:
    return torch.multinomial(torch.tensor([1.0, 2.0, 3.0]), max(s.numel(), 1), replacement=True, generator=g).view(s)


def _multinomial_out(s: torch.Size, g: Own) -> Tensor:
    out = torch.empty(s.numel(), dtype=torch.int64)
    torch.multinomial(torch.tensor([1.0, 2.0, 3.0]), s.numel(), replacement=True, generator=g, out=out)
    return out.view(s)


def _out(draw: Callable[[Tensor], object], dtype: torch.dtype = torch.float32) -> Callable[[torch.Size, Own], Tensor]:
    """A draw that fills `out`. A new tensor, or one that holds something already."""

    def fill(s: torch.Size, g: Own) -> Tensor:
        out = torch.empty(s, dtype=dtype)
        draw(out)
        return out

    return fill


DRAWS: dict[str, Callable[[torch.Size, Own], Tensor]] = {
    "rand": lambda s, g: torch.rand(s, generator=g),
    "randn": lambda s, g: torch.randn(s, generator=g),
    "rand_like": lambda s, g: torch.rand_like(_empty(s)),
    "randn_like": lambda s, g: torch.randn_like(_empty(s)),
    "randint": lambda s, g: torch.randint(0, 3, s, generator=g),
    "randint_high": lambda s, g: torch.randint(3, s, generator=g),
    "randint_like": lambda s, g: torch.randint_like(_empty(s), 0, 3),
    "randint_like_high": lambda s, g: torch.randint_like(_empty(s), 3),
    "rand_out": lambda s, g: _out(lambda o: torch.rand(s, generator=g, out=o))(s, g),
    "randn_out": lambda s, g: _out(lambda o: torch.randn(s, generator=g, out=o))(s, g),
    "randint_out": lambda s, g: _out(lambda o: torch.randint(0, 3, s, generator=g, out=o), torch.int64)(s, g),
    "bernoulli": lambda s, g: torch.bernoulli(_half(s), generator=g),
    "bernoulli_p": lambda s, g: torch.bernoulli(_half(s), 0.3, generator=g),
    "bernoulli_out": lambda s, g: _out(lambda o: torch.bernoulli(_half(s), generator=g, out=o))(s, g),
    "bernoulli_": lambda s, g: _empty(s).bernoulli_(0.6, generator=g),
    "bernoulli_tensor_": lambda s, g: _empty(s).bernoulli_(_half(s), generator=g),
    "normal_mean": lambda s, g: torch.normal(_half(s), 0.5, generator=g),
    "normal_std": lambda s, g: torch.normal(0.5, _half(s), generator=g),
    "normal_both": lambda s, g: torch.normal(_half(s), _half(s), generator=g),
    "normal_size": lambda s, g: torch.normal(0.5, 0.5, s, generator=g),
    "normal_out": lambda s, g: _out(lambda o: torch.normal(_half(s), _half(s), generator=g, out=o))(s, g),
    "normal_mean_out": lambda s, g: _out(lambda o: torch.normal(_half(s), 0.5, generator=g, out=o))(s, g),
    "normal_size_out": lambda s, g: _out(lambda o: torch.normal(0.0, 0.5, s, generator=g, out=o))(s, g),
    "normal_": lambda s, g: _empty(s).normal_(0.5, 0.5, generator=g),
    "uniform_": lambda s, g: _empty(s).uniform_(-1, 1, generator=g),
    "exponential_": lambda s, g: _empty(s).exponential_(2.0, generator=g),
    "geometric_": lambda s, g: _empty(s).geometric_(0.5, generator=g),
    "cauchy_": lambda s, g: _empty(s).cauchy_(generator=g),
    "log_normal_": lambda s, g: _empty(s).log_normal_(0.0, 0.5, generator=g),
    "random_": lambda s, g: _empty(s).random_(generator=g).div(2**24),
    "random_to_": lambda s, g: _empty(s).random_(3, generator=g),
    "random_range_": lambda s, g: _empty(s).random_(-1, 3, generator=g),
    "trunc_normal_": lambda s, g: nn.init.trunc_normal_(_empty(s), generator=g),
    "poisson": lambda s, g: torch.poisson(_half(s), generator=g),
    "binomial": lambda s, g: torch.binomial(_half(s) * 8, _half(s), generator=g),
    "gamma": lambda s, g: torch._standard_gamma(_half(s) + 1),
    "beta": lambda s, g: torch.distributions.Beta(_half(s) + 1, _half(s)).sample(),
    "normal_sample": lambda s, g: torch.distributions.Normal(_half(s), 0.5).rsample(),
    "multinomial": _multinomial,
    "multinomial_out": _multinomial_out,
}
# These take no generator.
_GLOBAL = {"rand_like", "randn_like", "randint_like", "randint_like_high", "gamma", "beta", "normal_sample"}


class Draw(Step):
    """A draw of its own.

    scope: one number per element or per sample; per channel or for all, the same for each sample; or per element, with
        the samples in the middle of the first axis (time-major) or in the last.
    own: from a generator that the module holds.
    """

    KINDS = tuple(DRAWS)

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.scope = rng.choice(["elements", "elements", "samples", "samples", "channels", "all", "time_major", "last"])
        self.own = self.kind not in _GLOBAL and rng.random() < 0.2
        self.generator = torch.Generator().manual_seed(rng.randint(0, 2**31)) if self.own else None
        self.adds = rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        shape, axis, before = {
            "elements": ((n, c, h, w), 0, 1),
            "samples": ((n, 1, 1, 1), 0, 1),
            "channels": ((1, c, 1, 1), None, 1),
            "all": ((1,), None, 1),
            "time_major": ((h * n, c, w), 0, h),
            "last": ((c, h, w, n), 3, 1),
        }[self.scope]
        draw = self.drawn(lambda: DRAWS[self.kind](torch.Size(shape), self.generator), axis, before)
        draw = draw.to(x.dtype).clamp(-3, 3)
        if self.scope == "time_major":
            draw = draw.unflatten(0, (h, n)).permute(1, 2, 0, 3)
        elif self.scope == "last":
            draw = draw.permute(3, 0, 1, 2)
        return x + 0.3 * draw if self.adds else x * (0.5 + 0.5 * draw)


class DrawFrom(Step):
    """A draw whose distribution each sample gives."""

    KINDS = (
        "bernoulli",
        "normal",
        "poisson",
        "binomial",
        "gamma",
        "multinomial",
        "gumbel",
        "gumbel_hard",
        "bernoulli_",
    )
    rough = True

    def forward(self, x: Tensor) -> Tensor:
        values = x.detach().contiguous()
        if self.kind == "multinomial":
            chances = values.flatten(1).softmax(1)
            choice = self.drawn(lambda: torch.multinomial(chances, 1))
            return x + 0.3 * x.flatten(1).gather(1, choice).view(-1, 1, 1, 1)
        if self.kind in ("gumbel", "gumbel_hard"):
            if self.note is None:
                return F.gumbel_softmax(x, hard=self.kind == "gumbel_hard", dim=1)
            gumbels = self.drawn(lambda: -torch.empty(x.shape, dtype=x.dtype).exponential_().log())
            soft = (x + gumbels).softmax(1)
            if self.kind == "gumbel":
                return soft
            hard = torch.zeros_like(soft).scatter_(1, soft.argmax(1, keepdim=True), 1.0)
            return hard - soft.detach() + soft
        draws = {
            "bernoulli": lambda: torch.bernoulli(values.sigmoid()),
            "bernoulli_": lambda: torch.empty_like(values).bernoulli_(values.sigmoid()),
            "normal": lambda: torch.normal(values, 0.1),
            "poisson": lambda: torch.poisson(values.abs()),
            "binomial": lambda: torch.binomial(torch.full_like(values, 5.0), values.sigmoid()),
            "gamma": lambda: torch._standard_gamma(values.abs() + 0.5),
        }
        return x * (0.5 + 0.5 * self.drawn(draws[self.kind]).clamp(-3, 3))


DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout_": lambda x: F.dropout(x, 0.4, inplace=True),
    "native": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "dropout1d": lambda x: F.dropout1d(x.flatten(2), 0.4).view_as(x),
    "dropout2d": lambda x: F.dropout2d(x, 0.4),
    "dropout3d": lambda x: F.dropout3d(x.unsqueeze(2), 0.4).squeeze(2),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, True),
    "feature_alpha": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "alpha_": lambda x: F.alpha_dropout(x, 0.3, True, inplace=True),
    "path": lambda x: x * torch.empty(len(x), 1, 1, 1, dtype=x.dtype).bernoulli_(0.6).div(0.6),
}


class Dropout(Step):
    """Operations that draw inside, independently of their input's values."""

    KINDS = ("path", "path", *DROPOUTS)

    def forward(self, x: Tensor) -> Tensor:
        act = DROPOUTS[self.kind]
        if self.note is None:
            return act(x)
        if not self.replaying:
            state = torch.get_rng_state()
            offset = act(torch.zeros_like(x))
            torch.set_rng_state(state)
            slope = act(torch.ones_like(x)) - offset
            self.remember((slope.clone(), offset.clone()))
        else:
            slope, offset = map(self.note.cut, self.recall())
        return x * slope + offset


class RandomSlope(Step):
    """Randomised leaky ReLU, which draws a slope for each negative value."""

    KINDS = ("function", "in_place", "module")
    rough = True

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.rrelu = nn.RReLU(0.1, 0.6)

    def forward(self, x: Tensor) -> Tensor:
        if self.note is None:
            if self.kind == "function":
                return F.rrelu(x, 0.1, 0.6, training=True)
            return F.rrelu_(x, 0.1, 0.6, training=True) if self.kind == "in_place" else self.rrelu(x)
        slope = self.drawn(lambda: self._slopes(x.detach()))
        out = torch.where(x > 0, x, x * slope)
        return out if self.kind == "in_place" else out.contiguous()  # as rrelu does: later draws follow the layout

    def _slopes(self, x: Tensor) -> Tensor:
        x = torch.where(x == 0, -1.0, x)  # a slope is drawn for zeros, too
        return F.rrelu(x, 0.1, 0.6, training=True) / x


class LayerDrop(Step):
    """One of two layers, by Python's or NumPy's generator, or by torch's: the same way in both passes."""

    KINDS = ("python", "numpy", "torch")

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.ways = nn.ModuleList([nn.Conv2d(CHANNELS, CHANNELS, 1) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        if self.replaying:
            way = self.recall()
        elif self.kind == "torch":
            way = int(torch.rand(()) < 0.5)
        else:
            draw = random.random if self.kind == "python" else np.random.random
            way = int(draw() < 0.5)
        self.remember(way)
        return self.ways[way](x)
