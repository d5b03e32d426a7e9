"""A random subset that never changes."""

from __future__ import annotations

from halfway.samplers import (
    RandomSubset,
)
from tests.helpers.sampled import N


def test_a_random_subset_never_changes() -> None:
    subsets = []
    for seed in (0, 1):
        sampler = RandomSubset(N, 0.3, seed=seed)
        found = set()
        for epoch in (0, 1, 7, 1):
            sampler.set_epoch(epoch)
            found.add(tuple(sampler.retained.tolist()))
        assert len(found) == 1
        subsets.append(found.pop())
        assert len(subsets[-1]) == 21
    assert subsets[0] != subsets[1]
