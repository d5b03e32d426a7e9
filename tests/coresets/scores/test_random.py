"""A random coreset."""

from __future__ import annotations

import torch

from halfway.coresets import (
    Evidence,
    RandomCoreset,
)
from tests.helpers.draws import within


def test_a_random_coreset_is_uniform_within_classes():
    counts, labels = torch.zeros(20), torch.arange(20) % 2
    for seed in range(300):
        counts[RandomCoreset().choose(Evidence(labels, 2), 0.3, seed=seed).ids] += 1
    assert all(within(count / 300, 0.3, 300) for count in counts.tolist())
