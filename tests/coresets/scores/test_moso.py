"""MoSo: against the gradients of all others, sample by sample."""

from __future__ import annotations

import pytest
import torch

from halfway.coresets import (
    Checkpoint,
    Evidence,
    MoSo,
)
from tests.helpers.draws import generator


def test_moso_is_the_agreement_with_the_others():
    source = generator(5)
    points, expected = [], torch.zeros(6, dtype=torch.float64)
    for lr in (0.5, 0.1, 0.02):
        g = torch.randn(6, 9, generator=source, dtype=torch.float64)
        points.append(Checkpoint(lr, g @ g.mean(0), g.square().sum(1)))
        for i in range(6):
            others = sum(g[j] for j in range(6) if j != i) / 6
            expected[i] += lr * float(others @ g[i]) / 3
    known = Evidence(torch.zeros(6, dtype=torch.int64), 1, checkpoints=points)
    assert torch.allclose(MoSo().score(known), expected)
    mixed = Evidence(
        torch.zeros(6, dtype=torch.int64), 1, checkpoints=[points[0], points[1]._replace(square_norms_N=None)]
    )
    with pytest.raises(ValueError, match=r"1 of 2 checkpoints have the norms.*same own_share"):
        MoSo().score(mixed)


def test_moso_prunes_a_sample_that_pulls_the_other_way():
    g = torch.tensor([[1.0, 0.1], [1.0, -0.1], [0.9, 0.0], [-3.0, 0.0]])
    known = Evidence(
        torch.zeros(4, dtype=torch.int64), 1, checkpoints=[Checkpoint(0.1, g @ g.mean(0), g.square().sum(1))]
    )
    assert 3 not in MoSo().choose(known, 0.75).ids.tolist()
