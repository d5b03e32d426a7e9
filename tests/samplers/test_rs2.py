"""RS2: another random subset every epoch, with and without replacement."""

from __future__ import annotations

from halfway.samplers import (
    RS2,
)


def test_rs2_without_replacement_uses_all_samples_before_it_repeats_any() -> None:
    sampler, used = RS2(10, 0.3, replacement=False), [0] * 10
    for epoch in range(30):
        sampler.set_epoch(epoch)
        assert len(set(sampler)) == 7
        for i in sampler:
            used[i] += 1
        assert max(used) - min(used) <= 1
    assert used == [21] * 10


def test_rs2_with_replacement_draws_every_epoch_anew_and_evenly() -> None:
    sampler, used, subsets = RS2(10, 0.5), [0] * 10, set()
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        subsets.add(tuple(sampler.retained.tolist()))
        for i in sampler:
            used[i] += 1
    assert len(subsets) > 200  # of 252
    assert all(abs(u - 500) < 5 * 15.9 for u in used)
