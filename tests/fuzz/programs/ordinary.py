"""Steps that treat each sample by itself, BatchNorm, and residual branches made of steps."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.reference import FullBatchNorm

from .base import CHANNELS, Step


class Conv(Step):
    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.conv = nn.Conv2d(
            CHANNELS, CHANNELS, 3, padding=1, groups=rng.choice([1, 1, 2, 4]), bias=rng.random() < 0.5
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Pointwise(Step):
    """A linear layer over channels: NCHW -> tokens -> NCHW, flattened to (N T, C) on the way, sometimes as (T N, C)."""

    KINDS = ("tokens", "rows", "time_major", "time_major_flat", "matmul")

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.linear = nn.Linear(CHANNELS, CHANNELS, bias=rng.random() < 0.7)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        if self.kind == "tokens":
            out = self.linear(tokens)
        elif self.kind == "rows":
            out = self.linear(tokens.reshape(n * h * w, c)).view(n, h * w, c)
        elif self.kind == "time_major":
            out = self.linear(tokens.transpose(0, 1)).transpose(0, 1)
        elif self.kind == "time_major_flat":
            out = self.linear(tokens.transpose(0, 1).reshape(-1, c)).view(h * w, n, c).transpose(0, 1)
        else:
            out = tokens @ self.linear.weight
        return out.transpose(1, 2).reshape(n, c, h, w)


class Attention(Step):
    KINDS = ("fused", "by_hand", "dropout")

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.heads = rng.choice([1, 2])

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        qkv = self.qkv(x.flatten(2).transpose(1, 2)).view(n, h * w, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.kind == "fused":
            out = F.scaled_dot_product_attention(q, k, v)
        elif self.kind == "dropout" and self.note is None:
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        else:
            weights = ((q @ k.transpose(-2, -1)) / (c // self.heads) ** 0.5).softmax(-1)
            if self.kind == "dropout":
                weights = weights * self.drawn(lambda: F.dropout(torch.ones_like(weights), 0.3))
            out = weights @ v
        return out.transpose(1, 2).reshape(n, h * w, c).transpose(1, 2).reshape(n, c, h, w) + x


class InPlace(Step):
    """Writes to the output of whatever came before."""

    KINDS = ("relu", "add", "mul", "view", "slice")

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.shift = nn.Parameter(torch.randn(CHANNELS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "relu":
            return F.relu_(x)
        if self.kind == "add":
            x += self.shift
        elif self.kind == "mul":
            x.mul_(0.7)
        elif self.kind == "view":
            x.unsqueeze(-1).transpose(0, 1).mul_(1.3)
        else:
            x[:, 0] = x[:, 0] * 0.5
        return x


class Cheap(Step):
    KINDS = ("gelu", "tanh", "flip", "softmax", "pool", "norm")

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.rough = self.kind == "pool"

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "flip":
            return x.flip(-1) + x.roll(1, 2)
        if self.kind == "softmax":
            return x.softmax(1) * 1.0
        if self.kind == "pool":
            return F.max_pool2d(x, 3, 1, 1)
        if self.kind == "norm":
            return F.group_norm(x, 2)
        return F.gelu(x) if self.kind == "gelu" else x.tanh() * 1.0


class Norm(Step):
    """BatchNorm. In a replay it has the statistics of all samples, unless its input depends on other samples."""

    rough = True  # in bfloat16 the reference rounds differently, and a maximum behind it then takes another way

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.bn = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        if not self.replaying or self.note.mixed:
            count = x.numel() // CHANNELS
            self.remember((x.mean((0, 2, 3)).detach(), x.var((0, 2, 3), correction=0).detach(), count))
            return self.bn(x)
        mean, variance, count = self.recall()
        with torch.no_grad():
            self.bn.running_mean.lerp_(mean, self.bn.momentum)
            self.bn.running_var.lerp_(variance * count / max(count - 1, 1), self.bn.momentum)
            self.bn.num_batches_tracked += 1
        return FullBatchNorm.apply(x, mean, variance, self.bn.weight, self.bn.bias, self.bn.eps)


class Residual(Step):
    """A branch of `make`'s steps beside the identity, at times zero-initialised."""

    def __init__(self, rng: random.Random, make: Callable[[], Step]) -> None:
        super().__init__(rng)
        self.inner = nn.ModuleList(make() for _ in range(rng.randint(1, 3)))
        self.gate = nn.Parameter(torch.zeros(1) if rng.random() < 0.2 else torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        out = x.clone()
        for step in self.inner:
            out = step(out)
        return x + self.gate * out
