"""Herding: against the definition, one norm at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from halfway.coresets import Evidence, Herding
from halfway.coresets.greedy.herding import herd
from tests.helpers.draws import randn
from tests.helpers.evidence import evidence


def slow_herd(features, count):
    chosen: list[int] = []
    for t in range(1, count + 1):
        total = features[chosen].sum(0)
        norms = {
            x: float((features.mean(0) - (features[x] + total) / t).norm())
            for x in range(len(features))
            if x not in chosen
        }
        chosen.append(min(norms, key=lambda x: norms[x]))
    return chosen


@pytest.mark.parametrize("seed", range(3))
def test_each_step_is_the_argmin_over_the_unchosen(seed):
    features = F.normalize(randn(25, 6, seed=seed).double(), dim=1)
    assert herd(features, 20).tolist() == slow_herd(features, 20)
    # Also for features that are not normalised: the method does that, the rule does not need it.
    features = randn(25, 6, seed=seed).double()
    assert herd(features, 20).tolist() == slow_herd(features, 20)


def test_classes_are_herded_apart_on_normalised_features():
    known = evidence()
    expected: list[int] = []
    for c in range(3):
        ids = (known.labels_N == c).nonzero().squeeze(1)
        features = F.normalize(known.features_ND[ids], dim=1)
        expected += ids[slow_herd(features, 8)].tolist()
    assert Herding().choose(known, 0.4).ids.tolist() == sorted(expected)


def test_the_typical_are_retained_and_not_the_farthest():
    angles = torch.cat([torch.linspace(-0.1, 0.1, 9), torch.tensor([1.5])])
    known = Evidence(torch.zeros(10, dtype=torch.int64), 1, torch.stack([angles.cos(), angles.sin()], 1))
    assert 9 not in Herding().choose(known, 0.2).ids.tolist()


def test_a_sample_is_chosen_once_even_if_all_are_equal():
    known = Evidence(torch.zeros(10, dtype=torch.int64), 1, torch.zeros(10, 3))
    assert len(set(Herding().choose(known, 0.7).ids.tolist())) == 7
