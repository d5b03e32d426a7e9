"""Mistakes with samplers are named with their fix."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from halfway import Schedule, WithIds
from halfway.samplers import (
    RS2,
    UCB,
    DynUnc,
    EpsilonGreedy,
    InfoBatch,
    WithWeights,
    make,
)
from tests.helpers.sampled import N, Squares


def test_a_sampler_that_is_never_fed_warns_once_with_the_line_to_add() -> None:
    sampler = UCB(N, 0.5, schedule=Schedule(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.set_epoch(0)
        sampler.set_epoch(1)
        with pytest.raises(UserWarning, match=r"add `sampler.observe\(ids, losses\)` to the loop"):
            sampler.set_epoch(2)
        sampler.set_epoch(2)
        sampler.set_epoch(3)
        fed, dull = UCB(N, 0.5), RS2(N, 0.5)
        fed.set_epoch(0)
        fed.observe(torch.arange(N), torch.rand(N))
        again = UCB(N, 0.5)
        again.load_state_dict(fed.state_dict())
        for quiet in (fed, dull, again):
            for epoch in range(3):
                quiet.set_epoch(epoch)


def decided(**options: Any) -> Any:
    sampler = InfoBatch(N, 0.5, **options)
    sampler.set_epoch(0)
    return sampler


IDS = torch.arange(3)
MISTAKES = {
    "ratio": (lambda: RS2(N, 1.0), ValueError, r"in \[0, 1\), got 1.0"),
    "steps": (lambda: RS2(N, 0.5, schedule=Schedule(unit="step")), ValueError, r"use Schedule\(..., unit='epoch'\)"),
    "empty": (lambda: RS2([], 0.5), ValueError, "the data set is empty"),
    "iterable": (lambda: RS2(iter([1]), 0.5), TypeError, "a data set with a length, or its length"),
    "timeout": (lambda: RS2(N, 0.5, timeout=0), ValueError, "timeout"),
    "name": (lambda: make("infobach", N, 0.5), ValueError, r"unknown sampler 'infobach'; choose one of \['dyn_unc'"),
    "threshold": (lambda: InfoBatch(N, 0.5, threshold=1.5), ValueError, "'mean', 'match' or a quantile"),
    "median": (lambda: InfoBatch(N, 0.5, threshold="median"), ValueError, "'mean', 'match' or a quantile"),
    "alpha": (lambda: UCB(N, 0.5, alpha=0), ValueError, r"alpha .* in \(0, 1\], got 0"),
    "period": (lambda: EpsilonGreedy(N, 0.5, period=0), ValueError, "period is in epochs"),
    "c": (lambda: UCB(N, 0.5, c=-1), ValueError, "c is the weight of the variance"),
    "epsilon": (lambda: EpsilonGreedy(N, 0.5, epsilon=2), ValueError, r"in \[0, 1\], got 2"),
    "window": (lambda: DynUnc(N, 0.5, window=1), ValueError, "from 2 on, got 1"),
    "no epoch": (lambda: list(RS2(N, 0.5)), RuntimeError, r"call sampler.set_epoch\(epoch\) before each epoch"),
    "no length": (lambda: len(RS2(N, 0.5)), RuntimeError, "set_epoch"),
    "no weights": (lambda: RS2(N, 0.5).weights(IDS), RuntimeError, "set_epoch"),
    "epoch": (lambda: RS2(N, 0.5).set_epoch(-1), ValueError, "epoch must be at least 0"),
    "half": (lambda: RS2(N, 0.5).set_epoch(0.5), TypeError, "epoch must be a whole number, got 0.5"),
    "skip": (lambda: RS2(N, 0.5).set_epoch(0, skip=16), ValueError, "skip=16 is more than the 15 samples"),
    "mean loss": (lambda: decided().observe(IDS, torch.tensor(1.0)), ValueError, "compute them with reduction='none'"),
    "lengths": (lambda: decided().observe(IDS, torch.ones(4)), ValueError, r"shape \(3,\), got .* \(4,\)"),
    "no tensor": (lambda: decided().observe([1], torch.ones(1)), ValueError, "ids must be a tensor .* got a list"),
    "float ids": (lambda: decided().observe(torch.ones(3), torch.ones(3)), ValueError, "whole numbers"),
    "range": (lambda: decided().observe(IDS + N, torch.ones(3)), ValueError, "from 0 to 29, .* got 30 to 32"),
    "dull range": (lambda: RS2(N, 0.5).observe(IDS + N, torch.ones(3)), ValueError, "from 0 to 29"),
    "weights": (lambda: decided().weights(IDS - 1), ValueError, "got -1 to 1"),
    "stream": (lambda: WithWeights(iter([1])), TypeError, "map-style data set"),
    "twice": (lambda: WithWeights(WithIds(Squares())), TypeError, "yields ids itself"),
    "taken": (lambda: WithWeights([{"weights": 1}])[0], ValueError, "already yields an entry 'weights'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_with_their_fix(mistake: str) -> None:
    call, error, words = MISTAKES[mistake]
    with pytest.raises(error, match=words):
        call()
