"""A model with layers that are no place to cut, and what an error must leave as it was."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """Shallow: stem, norm, dropout, cut. Some of its layers are no place to cut."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.cut = nn.Linear(6, 6)
        self.unused = nn.Linear(2, 2)
        self.twice = nn.Linear(6, 6)
        self.indices = Indices()
        self.pair = Pair()
        self.folded = Folded()
        self.flat = Flat()
        self.head = nn.Linear(6, 3)

    def forward(self, x, scale=None):
        x = self.cut(self.drop(self.norm(self.stem(x)))) * (1 + 0.1 * random.random())
        if scale is not None:
            x = x * scale
        x = self.twice(self.twice(x))
        x = x + 0.01 * self.indices(x) + self.pair(x)[0]
        return self.head(self.folded(x).T) + self.flat(x).mean()


class Indices(nn.Module):
    def forward(self, x):
        return x.argmax(1, keepdim=True)


class Pair(nn.Module):
    def forward(self, x):
        return x, 2 * x


class Folded(nn.Module):
    def forward(self, x):
        return x.T


class Flat(nn.Module):
    def forward(self, x):
        return x.sum(1)


def good(size=8):
    g = torch.Generator().manual_seed(size)
    return torch.randn(size, 4, generator=g), torch.randint(3, (size,), generator=g)


def with_nan(size=8):
    x, y = good(size)
    x[3, 1] = float("nan")
    return x, y


def world(model):
    """All that an error must leave as it was, as something that `==` compares."""
    numpy_state = np.random.get_state()  # noqa: NPY002
    hooks = [
        (name, kind, len(getattr(module, kind)))
        for name, module in model.named_modules()
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    ]
    return {
        "parameters and buffers": {k: v.tolist() for k, v in model.state_dict().items()},
        "gradients": [p.grad is None for p in model.parameters()],
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": (numpy_state[1].tolist(), numpy_state[2:]),
        "hooks": hooks,
        "global hooks": len(nn.modules.module._global_forward_pre_hooks),
        "methods": [n for n, m in model.named_modules() if {"forward", "_call_impl"} & vars(m).keys()],
    }


def assert_unchanged(model, before):
    for what, value in world(model).items():
        assert value == before[what], f"{what} changed"


def assert_trains(blocker, model):
    """A good batch goes through, is pruned, and gives gradients."""
    seen = blocker.stats.samples_seen
    x, y = blocker(*good())
    assert len(x) == len(y) == 4
    F.cross_entropy(model(x), y).backward()
    assert all(p.grad is not None for p in model.cut.parameters())
    assert blocker.stats.samples_seen == seen + 8
