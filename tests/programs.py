"""Random small programs for the fuzz test, and what training on the retained samples should do to them.

A program is a list of steps on feature maps (N, C, H, W). Each step is a module that runs in one of two ways: plainly,
or as the engine documents a replay: BatchNorm with the statistics and dropout with the draws that *all* samples had in
a first pass. The second way is written out with explicit side information, so it shares nothing with the engine but
the definition.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reference import FullBatchNorm

CHANNELS = 4


@dataclass
class Note:
    """Side information of a first pass over all samples: what a second pass over some of them is to use."""

    rows: Tensor | None = None
    kept: dict[nn.Module, list[Tensor]] = field(default_factory=dict)

    def pop(self, module: nn.Module) -> Tensor:
        return self.kept[module].pop(0)


class Step(nn.Module):
    """One step of a program. `note` is None in a plain run."""

    note: Note | None = None

    def remember(self, value: Tensor) -> None:
        if self.note is not None and self.note.rows is None:
            self.note.kept.setdefault(self, []).append(value)

    @property
    def replaying(self) -> bool:
        return self.note is not None and self.note.rows is not None


class Conv(Step):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            CHANNELS, CHANNELS, 3, padding=1, groups=rng.choice([1, 1, 2, 4]), bias=rng.random() < 0.5
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Pointwise(Step):
    """A linear layer over channels: NCHW -> tokens -> NCHW, flattened to (N T, C) on the way, sometimes as (T N, C)."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(CHANNELS, CHANNELS, bias=rng.random() < 0.7)
        self.order = rng.choice(["tokens", "rows", "time_major", "time_major_flat", "matmul"])

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        if self.order == "tokens":
            out = self.linear(tokens)
        elif self.order == "rows":
            out = self.linear(tokens.reshape(n * h * w, c)).view(n, h * w, c)
        elif self.order == "time_major":
            out = self.linear(tokens.transpose(0, 1)).transpose(0, 1)
        elif self.order == "time_major_flat":
            out = self.linear(tokens.transpose(0, 1).reshape(-1, c)).view(h * w, n, c).transpose(0, 1)
        else:
            out = tokens @ self.linear.weight
        return out.transpose(1, 2).reshape(n, c, h, w)


class Attention(Step):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.fused = rng.random() < 0.5
        self.heads = rng.choice([1, 2])

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        qkv = self.qkv(x.flatten(2).transpose(1, 2)).view(n, h * w, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            out = ((q @ k.transpose(-2, -1)) / c**0.5).softmax(-1) @ v
        return out.transpose(1, 2).reshape(n, h * w, c).transpose(1, 2).reshape(n, c, h, w) + x


class InPlace(Step):
    """Writes to the output of whatever came before."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.kind = rng.choice(["relu", "add", "mul", "view", "slice"])
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
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.kind = rng.choice(["gelu", "tanh", "flip", "softmax", "pool", "norm"])

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


class Dropout(Step):
    """Dropout, or drop path (one draw per sample)."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.path = rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        if self.replaying:
            draw = self.note.pop(self)[self.note.rows]
        else:
            draw = torch.empty(x.shape[0], 1, 1, 1, dtype=x.dtype) if self.path else torch.empty_like(x)
            draw.bernoulli_(0.6)
            self.remember(draw.clone())
        return x * draw.div(0.6)


class Norm(Step):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        if self.replaying:
            mean, variance = self.note.pop(self)
            return FullBatchNorm.apply(x, mean, variance, self.bn.weight, self.bn.bias, self.bn.eps)
        self.remember(torch.stack([x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)]).detach())
        return self.bn(x)


class Residual(Step):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.inner = nn.ModuleList(make_step(rng, depth=1) for _ in range(rng.randint(1, 3)))
        zero = rng.random() < 0.2
        self.gate = nn.Parameter(torch.zeros(1) if zero else torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        out = x.clone()
        for step in self.inner:
            out = step(out)
        return x + self.gate * out


class Mixing(Step):
    """Samples of the batch see each other: not replayable."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.kind = rng.choice(["roll", "flip", "mean", "pairs", "shuffle"])

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "roll":
            return 0.5 * x + 0.5 * x.roll(1, 0)
        if self.kind == "flip":
            return x.flip(0)
        if self.kind == "mean":
            return x - x.mean(0, keepdim=True)
        if self.kind == "pairs":
            similar = x.flatten(1) @ x.flatten(1).T
            return (similar.softmax(1) @ x.flatten(1)).view_as(x)
        return x[torch.randperm(len(x))]


class Branch(Step):
    """Two ways, chosen by a value of the batch (which differs between all and some samples) or of the parameters."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Conv2d(CHANNELS, CHANNELS, 1) for _ in range(2)])
        self.by = rng.choice(["batch", "sum", "parameter", "scale"])

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "scale":
            return self.ways[0](x * x.abs().mean().item())
        if self.by == "parameter":
            first = bool(self.ways[0].weight.mean() > 0)
        elif self.by == "batch":
            first = bool(x.mean() > 0.02)
        else:
            first = bool(x.sum() > 1)
        if self.by == "sum":
            return self.ways[0](x * 2 if first else x)
        return self.ways[0 if first else 1](x)


class PythonBranch(Step):
    """Layer drop by Python's generator: the same way in both passes."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Conv2d(CHANNELS, CHANNELS, 1) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        if self.replaying:
            way = int(self.note.pop(self))
        else:
            way = int(random.random() < 0.5)
            self.remember(torch.tensor(way))
        return self.ways[way](x)


def make_step(rng: random.Random, depth: int = 0) -> Step:
    kinds: list[type[Step]] = [
        Conv,
        Conv,
        Pointwise,
        Pointwise,
        Attention,
        InPlace,
        InPlace,
        Cheap,
        Cheap,
        Dropout,
        Norm,
    ]
    if depth == 0:
        kinds += [Residual, Residual, Mixing, Branch, PythonBranch]
    return rng.choice(kinds)(rng)


class DropElements(nn.Module):
    """Dropout whose draw does not depend on the memory layout of its input (that of nn.Dropout does)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape) > 0.2)


class Program(nn.Module):
    """A random program: a shallow part, the cut, a deep part, a skip connection across the cut.

    whole: it is to be blocked at its output, so that the deep part is like the shallow one: made of steps that note.
    """

    def __init__(self, rng: random.Random, whole: bool = False) -> None:
        super().__init__()
        torch.manual_seed(rng.randint(0, 2**31))
        self.shallow = nn.ModuleList(make_step(rng) for _ in range(rng.randint(1, 5)))
        self.cut = nn.Identity()
        self.deep = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), DropElements(), nn.BatchNorm2d(CHANNELS))
        if whole:
            self.deep = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), make_step(rng))
        self.skip = rng.choice([None, *range(len(self.shallow))])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out, skipped = x * 1.0, 0.0
        for i, step in enumerate(self.shallow):
            out = step(out)
            if i == self.skip:
                skipped = out.clone()
        return (self.deep(self.cut(out * 1.0)) + skipped).flatten(1).sum(1)

    def describe(self) -> str:
        """The steps with their settings, in a line."""
        steps = [m for m in self.modules() if isinstance(m, Step)]
        plain = [{k: v for k, v in vars(m).items() if k[0] != "_" and type(v) in (str, bool, int)} for m in steps]
        return " ".join(f"{type(m).__name__}{settings}" for m, settings in zip(steps, plain, strict=True))

    def set_note(self, note: Note | None) -> None:
        for module in self.modules():
            if isinstance(module, Step):
                module.note = note
