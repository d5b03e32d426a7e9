"""Dyn-Unc: the deviation over sliding windows, and a warning where no window can fill."""

from __future__ import annotations

import math
import statistics
import warnings

import pytest
import torch

from halfway import Schedule
from halfway.samplers import (
    DynUnc,
)
from tests.helpers.sampled import N, assert_highest, feed, loss_table

# Most trainings here are shorter than its window; the tests of the warning ask for it.
pytestmark = pytest.mark.filterwarnings("ignore:dyn_unc")


def test_dynamic_uncertainty_is_the_mean_deviation_over_sliding_windows() -> None:
    window, epochs, count = 3, 16, 18
    sampler, table = DynUnc(N, 0.4, window=window, seed=2), loss_table(epochs, seed=4)
    history: dict[int, list[float]] = {i: [] for i in range(N)}
    informed = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        scores = {}
        for i, p in history.items():
            if len(p) >= window:
                windows = [p[last - window : last] for last in range(window, len(p) + 1)]
                scores[i] = statistics.mean(statistics.stdev(w) for w in windows)
        assert_highest(sampler.retained.tolist(), scores, count)
        assert all(sampler.memory.values[i, 1] == pytest.approx(score, rel=1e-4) for i, score in scores.items())
        informed += len(scores) > N - count
        for i in feed(sampler, table[epoch]):
            history[i].append(math.exp(-table[epoch][i]))
    assert informed > 5


def test_a_window_that_cannot_fill_is_said_when_the_sampler_is_made() -> None:
    # The last decision is made before epoch 13: one visit in epoch 0, and half of the twelve epochs from 1 to 12.
    with pytest.warns(UserWarning, match=r"visited about 7 times before the last decision, in epoch 13.* 10 visits"):
        sampler = DynUnc(N, 0.5, schedule=Schedule(1, 14))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.set_epoch(1)  # once is enough
        DynUnc(N, 0.5, schedule=Schedule(1, 14), window=7)
        DynUnc(N, 0.5, schedule=Schedule(10, 14))
        DynUnc(N, 0.0, schedule=Schedule(1, 14))
        unknown = DynUnc(N, 0.5, schedule=Schedule(1))
    with pytest.warns(UserWarning, match="visited about 8 times"):
        unknown.foresee(16)


def test_an_epoch_that_is_drawn_without_any_score_is_said_once() -> None:
    sampler = DynUnc(N, 0.5, window=3)
    with pytest.warns(
        UserWarning, match=r"in epoch 0 no sample has the 3 visits .* window=.* Schedule\(start=window\)"
    ):
        sampler.set_epoch(0)
    late = DynUnc(N, 0.5, window=2, schedule=Schedule(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.observe(torch.arange(N), torch.rand(N))
        sampler.set_epoch(1)
        for epoch in range(4):
            late.set_epoch(epoch)
            late.observe(torch.arange(N), torch.rand(N))
