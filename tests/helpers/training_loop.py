"""Small networks, batches for them, and the steps of a plain training loop."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 5


class Net(nn.Module):
    """A small CNN with everything that could go out of step: BatchNorm, dropout, all three generators."""

    def __init__(self, batch_norm=True, dropout=0.2):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if batch_norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.block = nn.Conv2d(8, 8, 3, padding=1)
        self.deep = nn.Conv2d(8, 16, 3, stride=2)
        self.deep_norm = nn.BatchNorm2d(16) if batch_norm else nn.Identity()
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.drop(F.relu(self.norm(self.stem(x))))
        x = self.block(x) * (1 + 0.1 * random.random()) * (1 + 0.1 * np.random.rand())  # noqa: NPY002
        x = F.dropout(F.relu(self.deep_norm(self.deep(x))), 0.1, self.training)
        return self.head(x.mean((2, 3)))


class Plain(nn.Module):
    """No BatchNorm, no randomness."""

    def __init__(self, width=6):
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.deep = nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.deep(F.relu(self.stem(x)))


def batches(count, size=10, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 3, 8, 8, generator=g), torch.randint(CLASSES, (size,), generator=g)) for _ in range(count)
    ]


def vectors(count, size=10, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 4, generator=g), torch.randint(CLASSES, (size,), generator=g)) for _ in range(count)]


def seed_all(seed=3):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def generators():
    """The global generators, as something that `==` compares."""
    numpy_state = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist(), numpy_state[2:]


def identical(a, b):
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[k], theirs[k]) for k in ours)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def hooks_of(model):
    """Every hook and patched forward in a model; empty for an untouched one."""
    found = []
    for name, module in model.named_modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            found += [(name, kind)] * len(getattr(module, kind))
        found += [(name, method) for method in ("forward", "_call_impl") if method in vars(module)]
    found += [("global", "forward_pre")] * len(nn.modules.module._global_forward_pre_hooks)
    return found


def selections(blocker, model, optimizer, data):
    chosen = []
    for x, y in data:
        train_step(model, optimizer, *blocker(x, y))
        chosen.append(blocker.last.indices.tolist())
    return chosen
