"""InfoBatch: prunes well-learnt samples at random, and re-weights those like them that stay."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from halfway.samplers import (
    InfoBatch,
)
from tests.helpers.sampled import N, feed, loss_table


def candidates(losses: dict[int, float], threshold: float | str, ratio: float) -> set[int]:
    if threshold == "mean":
        mean = sum(losses.values()) / len(losses)
        return {i for i, loss in losses.items() if loss < mean}
    q = math.sqrt(ratio) if threshold == "match" else float(threshold)
    count = next(c for c in range(len(losses) + 1) if c / len(losses) >= q - 1e-12)
    return set(sorted(losses, key=lambda i: losses[i])[:count])


@pytest.mark.parametrize("threshold", ["mean", 0.25, 0.95, 1.0, "match"])
def test_infobatch_prunes_candidates_only_and_re_weights_those_that_stay(threshold: Any) -> None:
    ratio, epochs = 0.4, 6
    sampler, table = InfoBatch(N, ratio, threshold=threshold, seed=3), loss_table(epochs)
    known: dict[int, float] = {}
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        retained = set(sampler.retained.tolist())
        expected = candidates(known, threshold, ratio) if known else set()
        assert set(range(N)) - retained <= expected
        rate = 0.4 * len(known) / len(expected) if threshold == "match" and expected else ratio
        for i in sampler:
            assert i.weight == pytest.approx(1 / (1 - rate) if i in expected else 1.0)
        # Of the first epoch only a half is told, so that what is known grows.
        met = feed(sampler, table[epoch], None if epoch else list(range(0, N, 2)))
        known |= {i: table[epoch][i] for i in met}
    assert 0 < sampler.effective_ratio < ratio


def test_samples_nobody_has_seen_are_never_candidates() -> None:
    sampler = InfoBatch(10, 0.9, threshold=1.0)
    sampler.set_epoch(0)
    assert sampler.last_ratio == 0
    sampler.observe(torch.arange(5), torch.zeros(5))
    sampler.observe(torch.tensor([4]), torch.tensor([float("nan")]))
    for epoch in range(1, 20):
        sampler.set_epoch(epoch)
        assert set(range(4, 10)) <= set(sampler.retained.tolist())
        assert torch.equal(sampler.weights(torch.arange(4, 10)), torch.ones(6))


@pytest.mark.parametrize("threshold", ["mean", 0.95, "match"])
def test_infobatch_gradients_are_unbiased_and_its_ratio_is_as_documented(threshold: Any) -> None:
    samples, ratio, decisions = 40, 0.5, 1500
    losses = [x * x for x in loss_table(1, samples)[0]]
    gradients = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sampler = InfoBatch(samples, ratio, threshold=threshold)
    sampler.observe(torch.arange(samples), torch.tensor(losses))
    means, ratios = [], []
    for epoch in range(decisions):
        sampler.set_epoch(epoch)
        ids = sampler.retained
        means.append((sampler.weights(ids).double().unsqueeze(1) * gradients[ids]).sum(0) / samples)
        ratios.append(sampler.last_ratio)
    among = candidates(dict(enumerate(losses)), threshold, ratio)
    g = gradients[sorted(among)]
    rate = ratio * samples / len(among) if threshold == "match" else ratio
    variance = g.square().sum(0) * rate / (1 - rate) / samples**2
    if threshold == "match":  # drawn without replacement from the candidates: sampling theory's (n - s) / (n s) S^2
        n, s = len(g), len(g) * (1 - rate)
        variance = g.var(0) * (n - s) / (n * s) * (n / samples) ** 2
    estimates = torch.stack(means)
    assert ((estimates.mean(0) - gradients.mean(0)).abs() < 4 * (variance / decisions).sqrt()).all()
    assert torch.allclose(estimates.var(0), variance, rtol=0.2)
    expected_ratio = {"mean": ratio * len(among) / samples, 0.95: 0.95 * ratio, "match": ratio}[threshold]
    assert statistics.mean(ratios) == pytest.approx(expected_ratio, abs=0.008)
    if threshold == "match":
        assert set(ratios) == {ratio}


def test_the_mean_threshold_prunes_nobody_when_all_losses_are_equal() -> None:
    for loss in (1.0, 0.1, 0.3, 0.7, 2.3):
        sampler = InfoBatch(N, 0.9)
        sampler.observe(torch.arange(N), torch.full((N,), loss))
        sampler.set_epoch(0)
        assert sampler.last_ratio == 0
