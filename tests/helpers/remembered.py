"""Candidates with ids, what is told of them, and how often each of them stays."""

from __future__ import annotations

import io
import math

import torch
from torch import nn

from halfway.selectors import Candidates, LastLoss
from tests.helpers.draws import generator

NAN = math.nan


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.ReLU())
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.body(x))


def candidates(ids=None, seed=0, size=None, **others):
    source = seed if isinstance(seed, torch.Generator) else generator(seed)
    return Candidates(len(ids) if size is None else size, source, ids=ids, **others)


def frequencies(selector, ids, count, draws, source):
    """How often each of the samples stays, and each pair of them."""
    chosen = torch.zeros(draws, len(ids), dtype=torch.float64)
    for row in chosen:
        row[selector.select(candidates(ids, source), count).indices] = 1
    return chosen.mean(0), chosen.T @ chosen / draws


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def teach(selector, batch, retained, losses):
    selector.learn(batch, retained)
    selector.observe(batch, retained, losses)


def knowing(losses, make=LastLoss, **settings):
    """A selector that has seen these losses; NaN: not yet."""
    selector = make(**settings)
    losses = torch.tensor(losses)
    known = (~losses.isnan()).nonzero().squeeze(1)
    selector.observe(candidates(torch.arange(len(losses))), known, losses[known])
    selector.check()
    return selector
