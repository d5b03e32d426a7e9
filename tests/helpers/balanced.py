"""Batches for balanced sampling, many draws of it, and whether they are equally likely."""

from __future__ import annotations

import math

import torch
from torch import nn

from halfway.selectors import Balanced, BalancedRemembered, Candidates
from tests.helpers.draws import generator, randn

# By where the features come from.
SOURCES = {"cut": Balanced, "remembered": BalancedRemembered}


def candidates(features=None, seed=0, size=None, **others):
    source = seed if isinstance(seed, torch.Generator) else generator(seed)
    return Candidates(len(features) if size is None else size, source, features, **others)


def clustered(size, seed=0):
    """Some tight clusters of different sizes, some outliers."""
    centres = 5 * randn(4, 3, seed=seed)
    member = torch.randint(4, (size,), generator=generator(seed + 1)) ** 2 // 3
    x = centres[member] + 0.05 * randn(size, 3, seed=seed + 2)
    x[::7] = 8 * randn(len(x[::7]), 3, seed=seed + 3)
    return x


def between(x):
    return torch.cdist(x.double(), x.double(), compute_mode="donot_use_mm_for_euclid_dist")


def drawn(draw, size, draws):
    """(draws, size) of zeros and ones."""
    chosen = torch.zeros(draws, size, dtype=torch.float64)
    for row in chosen:
        row[draw()] = 1
    return chosen


def assert_equally_likely(chosen, probability):
    """Two tests at once. Each sample alone: no frequency is too far off. Together: neither is their sum of squares,
    which chi-square bounds, because samples of a fixed number are correlated negatively on average."""
    from scipy import stats  # here, so that the processes of other tests need not load it

    draws, size = chosen.shape
    z = (chosen.mean(0) - probability) / math.sqrt(probability * (1 - probability) / draws)
    assert z.abs().max() < stats.norm.isf(1e-5 / size)
    assert z.square().sum() < 2 * stats.chi2.isf(1e-5, size - 1)


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU())
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))
