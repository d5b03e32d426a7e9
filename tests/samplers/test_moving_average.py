"""UCB and epsilon-greedy: moving averages of the losses, decided upon every few epochs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfway import Schedule
from halfway.samplers import (
    UCB,
    EpsilonGreedy,
)
from tests.helpers.sampled import N, assert_highest, feed, loss_table


@pytest.mark.parametrize(("cls", "extra"), [(UCB, {"c": 2.0}), (EpsilonGreedy, {"epsilon": 0.25})])
@pytest.mark.parametrize("start", [0, 2])
def test_moving_averages_decide_every_few_epochs_as_the_reference_does(cls: Any, extra: Any, start: int) -> None:
    alpha, period, epochs, count = 0.7, 3, 14, 18
    sampler = cls(N, 0.4, alpha=alpha, period=period, schedule=Schedule(start), seed=1, **extra)
    table, mean, variance = loss_table(epochs), {}, {}
    before: list[int] = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        retained = sampler.retained.tolist()
        if epoch < start:
            assert len(retained) == N
        elif (epoch - start) % period:
            assert retained == before
        elif cls is UCB:
            assert_highest(retained, {i: mean[i] + 2.0 * variance[i] for i in mean}, count)
        else:
            greedy, unknown = count - round(0.25 * count), set(range(N)) - set(mean)
            best = set(sorted(mean, key=lambda i: -mean[i])[: max(0, greedy - len(unknown))])
            assert len(retained) == count
            assert best <= set(retained)
            assert len(unknown) > greedy or unknown <= set(retained)
        before = retained
        for i in feed(sampler, table[epoch]):
            loss = table[epoch][i]
            if i in mean:
                difference = loss - mean[i]
                variance[i] = (1 - alpha) * variance[i] + alpha * difference**2
                mean[i] = alpha * loss + (1 - alpha) * mean[i]
            else:
                mean[i], variance[i] = loss, 0.0
    assert len(mean) == N, "samples that were never seen come first, so all are seen before long"


def test_going_back_into_the_window_chooses_anew_instead_of_going_on_with_everybody() -> None:
    sampler = UCB(N, 0.5, schedule=Schedule(0, 3))
    sampler.observe(torch.arange(N), torch.arange(float(N)))
    for epoch, count in ((2, 15), (3, N), (2, 15)):
        sampler.set_epoch(epoch)
        assert len(sampler) == count


def test_epsilon_greedy_draws_the_others_evenly() -> None:
    sampler, times = EpsilonGreedy(20, 0.5, epsilon=0.4, period=1), [0] * 20
    sampler.observe(torch.arange(20), torch.arange(20.0))
    for epoch in range(2000):
        sampler.set_epoch(epoch)
        for i in sampler.retained.tolist():
            times[i] += 1
    assert times[14:] == [2000] * 6
    # 4 of the other 14 each time: binomial, 571 with a standard deviation of 20.
    assert all(abs(t - 2000 * 4 / 14) < 5 * 20.2 for t in times[:14])
