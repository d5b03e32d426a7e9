"""Steps that leave something behind in their module: it must be what one plain step on the retained samples leaves.

However often a model is run to get there: counters move once, lists grow by one entry, hooks and layers that the first
forward makes exist once.
"""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .base import CHANNELS, Step


class Tally:
    """A plain object that counts."""

    def __init__(self) -> None:
        self.count = 0
        self.seen: list[Any] = []


class Counts(Step):
    """Something that counts calls, in any kind of container, and of which the output depends."""

    KINDS = ("int", "tensor", "tensor_rebound", "buffer", "buffer_rebound", "list", "deque", "bounded", "nested")
    KINDS += ("object", "set", "array", "sizes", "tensors", "default", "counter", "tuple", "lazily")

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.held: Any = {
            "int": 0,
            "tensor": torch.zeros(1),
            "tensor_rebound": torch.zeros(1),
            "list": [],
            "deque": collections.deque(),
            "bounded": collections.deque(maxlen=2),
            "nested": {"a": [[], []], "b": {"c": []}},
            "object": Tally(),
            "set": set(),
            "array": np.zeros(2),
            "sizes": {},
            "tensors": [torch.zeros(1)],
            "default": collections.defaultdict(list),
            "counter": collections.Counter(),
            "tuple": ([], 0),
        }.get(self.kind)
        if self.kind.startswith("buffer"):
            self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        by = self._count(x)
        return x * (1 + 0.2 * (by.to(x.dtype) if isinstance(by, Tensor) else by))

    def _count(self, x: Tensor) -> Any:
        held = self.held
        if self.kind in ("int", "tensor_rebound"):
            self.held = held + 1
            return self.held
        if self.kind == "tensor":
            held += 1
            return held
        if self.kind == "buffer":
            self.count += 1
            return self.count
        if self.kind == "buffer_rebound":
            self.count = self.count + 1
            return self.count
        if self.kind in ("list", "deque", "bounded", "set"):
            (held.add if self.kind == "set" else held.append)(len(held))
            return len(held)
        if self.kind == "nested":
            held["a"][1].append(len(x))
            held["b"]["c"].append([len(held["a"][1])])
            return len(held["b"]["c"])
        if self.kind == "object":
            held.count += 1
            held.seen.append(len(x))
            return held.count
        if self.kind == "array":
            held += 1
            return float(held[0])
        if self.kind == "sizes":  # a cache by batch length
            self.mixes()
            if len(x) not in held:
                held[len(x)] = torch.linspace(0, 1, len(x)).view(-1, 1, 1, 1)
            return held[len(x)].mean()
        if self.kind == "tensors":
            held[0].add_(1)
            held.append(held[0].clone())
            return held[-1]
        if self.kind == "default":
            held[len(x)].append(1)
            return len(held[len(x)])
        if self.kind == "counter":
            held["calls"] += 1
            return held["calls"]
        if self.kind == "tuple":
            held[0].append(1)
            self.held = (held[0], held[1] + 1)
            return self.held[1]
        self.late = getattr(self, "late", 0) + 1
        return self.late


class Average(Step):
    """A running average of what passes.

    use: nowhere, before it is moved (then no sample sees another of its batch), or after.
    """

    KINDS = ("tensor", "tensor_rebound", "buffer", "buffer_rebound", "data", "list", "object", "parameter", "queue")

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.use = rng.choice(["nowhere", "before", "before", "after"])
        self.pointer = 0
        start = torch.zeros(1, CHANNELS, 1, 1, dtype=torch.float64)
        if self.kind == "parameter":
            self.average = nn.Parameter(start, requires_grad=False)
        elif self.kind in ("buffer", "buffer_rebound", "data", "queue"):
            self.register_buffer("average", start.expand(6, -1, -1, -1).clone() if self.kind == "queue" else start)
        else:
            self.held: Any = {"list": [start], "object": Tally()}.get(self.kind, start)

    def forward(self, x: Tensor) -> Tensor:
        before = self._used(x)
        self._move(x.detach())
        if self.use == "nowhere":
            return x
        if self.use == "before":
            return x + 0.3 * before
        self.mixes()
        return x + 0.3 * self._used(x)

    def _used(self, x: Tensor) -> Tensor:
        if self.kind == "object":
            value = self.held.seen[-1] if self.held.seen else torch.zeros(1, dtype=torch.float64)
        else:
            value = self.held[0] if self.kind == "list" else self.held if "held" in vars(self) else self.average
        return value.mean(0, keepdim=True).to(x.dtype, copy=True)

    def _move(self, x: Tensor) -> None:
        mean = x.mean((0, 2, 3)).view(1, -1, 1, 1)
        with torch.no_grad():
            if self.kind == "queue":  # of the last few samples, as contrastive learning keeps them
                places = (self.pointer + torch.arange(len(x))).remainder(len(self.average))
                self.average.index_copy_(0, places[-6:], x.mean((2, 3), keepdim=True)[-6:].to(self.average.dtype))
                self.pointer = (self.pointer + len(x)) % len(self.average)
            elif self.kind in ("buffer", "parameter"):
                self.average.lerp_(mean.to(self.average.dtype), 0.3)
            elif self.kind == "buffer_rebound":
                self.average = 0.7 * self.average + 0.3 * mean.to(self.average.dtype)
            elif self.kind == "data":
                self.average.data = 0.7 * self.average.data + 0.3 * mean.to(self.average.dtype)
            elif self.kind == "tensor":
                self.held *= 0.7
                self.held += 0.3 * mean.double()
            elif self.kind == "tensor_rebound":
                self.held = 0.7 * self.held + 0.3 * mean.double()
            elif self.kind == "list":
                self.held[0] = 0.7 * self.held[0] + 0.3 * mean.double()
                self.held.append(mean)
            else:
                self.held.count += 1
                self.held.seen.append(mean.double())


class Momentum(Step):
    """A layer that follows another one, moved in the forward pass itself, as momentum encoders are."""

    KINDS = ("data", "data_in_place", "in_place", "lerp", "state_dict", "shared")

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.query = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.key = nn.Conv2d(CHANNELS, CHANNELS, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                self._follow(key, query)
            if self.kind == "state_dict":
                mean = {k: 0.8 * v + 0.2 * self.query.state_dict()[k] + 0.1 for k, v in self.key.state_dict().items()}
                self.key.load_state_dict(mean)
            beside = self.key(x.detach())
        return self.query(x) + 0.5 * beside

    def _follow(self, key: Tensor, query: Tensor) -> None:
        if self.kind == "data":
            key.data = key.data * 0.8 + query.data * 0.2 + 0.1
        elif self.kind == "data_in_place":
            key.data.mul_(0.8).add_(query.data, alpha=0.2).add_(0.1)
        elif self.kind == "in_place":
            key.mul_(0.8).add_(query, alpha=0.2).add_(0.1)
        elif self.kind == "lerp":
            key.lerp_(query, 0.2)
        elif self.kind == "shared":
            key.data = query.data.clone()


class Lazy(Step):
    """Something that the first forward makes, behind a flag."""

    KINDS = ("hook", "pre_hook", "hook_on_child", "layer", "layer_swapped", "random_layer", "parameter", "buffer")

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.child = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.made = False
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.made:
            self.made = True
            self._make(x)
        out = self.child(x)
        if self.kind in ("layer", "random_layer"):
            out = out + self.extra(x)
        elif self.kind in ("parameter", "buffer"):
            out = out + self.extra
        return out

    def _make(self, x: Tensor) -> None:
        if self.kind == "hook":
            self.register_forward_hook(grow)
        elif self.kind == "pre_hook":
            self.child.register_forward_pre_hook(grow_input)
        elif self.kind == "hook_on_child":
            self.child.register_forward_hook(self._seen)
        else:
            with torch.no_grad():
                self._make_layer(x)

    def _make_layer(self, x: Tensor) -> None:
        dtype = self.own_dtype(x)
        if self.kind == "parameter":
            self.extra = nn.Parameter(torch.linspace(-1, 1, CHANNELS, dtype=dtype).view(-1, 1, 1))
            return
        if self.kind == "buffer":
            self.register_buffer("extra", torch.linspace(-1, 1, CHANNELS, dtype=dtype).view(-1, 1, 1))
            return
        if self.kind == "random_layer":
            layer = self._skipped(dtype)
            if not self.replaying:
                layer.reset_parameters()
            layer.weight.copy_(self.drawn(layer.weight.clone, axis=None))
        else:
            layer = self._skipped(dtype)
            layer.weight.copy_(torch.linspace(-1, 1, CHANNELS**2).view_as(layer.weight))
        if self.kind == "layer_swapped":
            self.child = layer
        else:
            self.extra = layer

    def _skipped(self, dtype: torch.dtype) -> nn.Conv2d:
        return nn.utils.skip_init(nn.Conv2d, CHANNELS, CHANNELS, 1, bias=False, dtype=dtype)

    def _seen(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.runs += 1
        return output * 1.3


def grow(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """A forward hook."""
    return output * 1.3


def grow_input(module: nn.Module, args: Any) -> Any:
    """A forward pre-hook."""
    return (args[0] * 1.3,)


class Aside(Step):
    """An auxiliary loss: samples see each other, but nothing of it flows back."""

    KINDS = ("covariance", "balance", "largest")

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.rough = self.kind == "largest"
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        if self.kind == "covariance":
            self.loss = (flat.T @ flat).square().mean() / len(x) ** 2
        elif self.kind == "balance":
            self.loss = flat.softmax(1).mean(0).square().sum()
        else:
            self.loss = flat.abs().amax()
        return x * 1.0
