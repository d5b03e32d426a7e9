"""Moderate: against a loop."""

from __future__ import annotations

import math

import pytest
import torch

from halfway.coresets import (
    Evidence,
    Moderate,
)
from tests.helpers.evidence import evidence


def test_moderate_is_the_distance_from_the_median_distance():
    known = evidence(num_samples=63)
    found = Moderate().score(known)
    for c in range(3):
        ids = (known.labels_N == c).nonzero().squeeze(1).tolist()
        rows = [known.features_ND[i].tolist() for i in ids]
        middle = [sorted(column)[10] for column in zip(*rows, strict=True)]
        distances = [math.dist(row, middle) for row in rows]
        median = sorted(distances)[10]
        for i, d in zip(ids, distances, strict=True):
            assert float(found[i]) == pytest.approx(-abs(d - median), abs=1e-5)


def test_moderate_prunes_the_typical_and_the_odd():
    # One class on a line: distances to the median 0 are 0, 1, 1, 2, 2, 3, 3, 9, 9.
    line = torch.tensor([0.0, 1, -1, 2, -2, 3, -3, 9, -9]).unsqueeze(1)
    known = Evidence(torch.zeros(9, dtype=torch.int64), 1, line)
    assert Moderate().choose(known, 0.45).ids.tolist()[-2:] == [3, 4]
    assert not {0, 7, 8} & set(Moderate().choose(known, 0.6).ids.tolist())
