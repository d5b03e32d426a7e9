"""k-Center: against the definition, and its bound against all subsets."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from halfway.coresets import Evidence, KCenter
from halfway.coresets.greedy.k_center import farthest_first, medoid
from tests.helpers.draws import randn


def radius(features, chosen):
    return max(min(float((x - features[c]).norm()) for c in chosen) for x in features)


@pytest.mark.parametrize("first", [0, 7])
def test_each_step_is_the_farthest_from_all_chosen(first):
    features = randn(30, 5, seed=2).double()
    chosen = [first]
    while len(chosen) < 12:
        distances = [min(float((x - features[c]).norm()) for c in chosen) for x in features]
        chosen.append(max(range(30), key=lambda x, d=distances: d[x]))
    assert farthest_first(features, 12, first).tolist() == chosen


@pytest.mark.parametrize("seed", range(4))
def test_the_radius_is_at_most_twice_the_best(seed):
    features = randn(10, 3, seed=seed).double()
    best = min(radius(features, chosen) for chosen in itertools.combinations(range(10), 3))
    assert radius(features, farthest_first(features, 3, 0).tolist()) <= 2 * best + 1e-9


def test_the_medoid_has_the_smallest_sum_of_distances(monkeypatch):
    features = randn(20, 3, seed=4).double()
    sums = [sum(float((x - y).norm()) for y in features) for x in features]
    assert medoid(features) == sums.index(min(sums))
    monkeypatch.setattr("halfway.coresets.greedy.k_center._BLOCK", 6)
    assert medoid(features) == sums.index(min(sums))


def test_the_first_centre_counts_and_is_the_medoid_if_asked():
    features = randn(20, 3, seed=5).double()
    known = Evidence(torch.zeros(20, dtype=torch.int64), 1, features)
    first = medoid(F.normalize(features, dim=1))
    assert KCenter("medoid").choose(known, 0.05).ids.tolist() == [first]
    assert len({KCenter().choose(known, 0.05, seed=seed).ids.item() for seed in range(30)}) > 8


def test_an_outlier_is_chosen_before_near_twins():
    angles = torch.tensor([0.0, 0.01, 0.02, 0.03, 1.5])
    known = Evidence(torch.zeros(5, dtype=torch.int64), 1, torch.stack([angles.cos(), angles.sin()], 1))
    assert all(4 in KCenter().choose(known, 0.4, seed=seed).ids.tolist() for seed in range(5))


def test_equal_samples_are_chosen_once_each():
    known = Evidence(torch.zeros(10, dtype=torch.int64), 1, torch.ones(10, 3))
    assert len(set(KCenter().choose(known, 0.7).ids.tolist())) == 7
