"""What blocker.stats counts: samples, steps, operations, and the cost relative to full training."""

import pytest
import torch
from torch import nn

from halfway import ForwardBlocker, Random, Schedule
from tests.helpers.training_loop import Net, Plain, batches, optimizer_of, train_step, vectors


def test_stats_count_samples_steps_and_operations():
    model = Net(batch_norm=False, dropout=0.0)
    blocker = ForwardBlocker(model, "block", 0.4, schedule=Schedule(1, 4, unit="step"))
    assert blocker.stats.steps == 0
    assert blocker.stats.relative_flops == 1
    optimizer = optimizer_of(model)
    for x, y in batches(5):
        train_step(model, optimizer, *blocker(x, y))
    stats = blocker.stats
    assert (stats.steps, stats.pruned_steps) == (5, 3)
    assert (stats.samples_seen, stats.samples_retained) == (50, 38)
    assert stats.effective_ratio == pytest.approx(12 / 50)
    assert (stats.steps_replayed, stats.steps_recomputed) == (3, 0)
    assert stats.operations_replayed == 2 * 3
    assert stats.operations_computed == 0
    assert stats.recompute_reasons == {}
    share = blocker._engine.meter.shallow_share
    assert stats.relative_flops == pytest.approx((2 * 10 + 3 * (6 + 4 * share)) / 50)
    assert set(stats.as_dict()) == set(vars(stats)) - {"recompute_reasons", "diagnostics", "explanation", "lag"}


def test_relative_flops_is_the_retained_share_plus_the_probe_of_the_pruned():
    """Counted by hand: a forward of 12 and 6 multiplications, and a backward without gradients for the input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    blocker = ForwardBlocker(model, "0", 0.4)
    for x, _ in vectors(3):
        model(blocker(x)).sum().backward()
    stats = blocker.stats
    assert stats.steps_replayed == 3
    share = blocker._engine.meter.shallow_share
    assert stats.relative_flops == pytest.approx(0.6 + 0.4 * share)
    assert 12 / (3 * 18) - 1e-9 <= share <= 12 / (18 + 18 + 6) + 1e-9


def test_relative_flops_of_recomputed_steps_pays_the_shallow_part_of_the_retained_twice():
    model = Net(batch_norm=False)
    blocker = ForwardBlocker(model, "block", 0.4, reuse="recompute")
    for x, _ in batches(3):
        model(blocker(x))
    share = blocker._engine.meter.shallow_share
    stats = blocker.stats
    assert 0 < share < 0.5
    assert stats.relative_flops == pytest.approx(0.6 + share)
    assert stats.steps_recomputed == 3
    assert list(stats.recompute_reasons.values()) == [3]


def test_random_without_a_probe_costs_the_retained_share_alone():
    blocker = ForwardBlocker(Plain(), None, 0.4, selector=Random())
    blocker(torch.randn(10, 4))
    assert blocker.stats.relative_flops == pytest.approx(0.6)
    assert blocker.stats.effective_ratio == pytest.approx(0.4)
