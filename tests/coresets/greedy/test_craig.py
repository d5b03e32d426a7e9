"""Craig: gradients from Gram matrices, lazy greedy as plain greedy, the bound of greedy, and the weights."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from halfway.coresets import Craig, Evidence
from halfway.coresets.greedy.craig import similarities
from halfway.coresets.greedy.facility_location import cluster_sizes, lazy_greedy
from halfway.coresets.last_layer import factors
from tests.helpers.draws import generator, randn
from tests.helpers.evidence import evidence


def value(similarity, chosen):
    return float(similarity[:, list(chosen)].amax(1).sum())


def plain_greedy(similarity, count):
    chosen: list[int] = []
    for _ in range(count):
        rest = [j for j in range(len(similarity)) if j not in chosen]
        chosen.append(max(rest, key=lambda j: value(similarity, [*chosen, j])))
    return chosen


def some_similarity(size, seed):
    points = randn(size, 3, seed=seed).double()
    distances = torch.cdist(points, points)
    return distances.max() - distances


@pytest.mark.parametrize("at_once", [1, 3, 32])
@pytest.mark.parametrize("seed", range(4))
def test_lazy_greedy_is_greedy(seed, at_once, monkeypatch):
    monkeypatch.setattr("halfway.coresets.greedy.facility_location._AT_ONCE", at_once)
    similarity = some_similarity(24, seed)
    assert lazy_greedy(similarity, 20).tolist() == plain_greedy(similarity, 20)


def test_equal_rows_are_chosen_once_each_and_in_order():
    similarity = torch.ones(6, 6)
    assert lazy_greedy(similarity, 5).tolist() == [0, 1, 2, 3, 4]
    assert cluster_sizes(similarity, torch.tensor([3, 1])).tolist() == [5, 1]


@pytest.mark.parametrize("seed", range(5))
def test_greedy_is_within_its_bound_of_the_best(seed):
    similarity = some_similarity(9, seed)
    best = max(value(similarity, chosen) for chosen in itertools.combinations(range(9), 3))
    assert value(similarity, lazy_greedy(similarity, 3).tolist()) >= (1 - 1 / math.e) * best


def test_distances_are_those_of_the_gradients():
    known = evidence()
    ids = torch.arange(20)
    weight = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    rows = []
    for i in range(20):
        logits = known.logits_NC[i] + weight @ known.features_ND[i] + bias
        loss = torch.nn.functional.cross_entropy(logits, known.labels_N[i])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, [weight, bias])]))
    slow = torch.cdist(torch.stack(rows), torch.stack(rows))
    assert torch.allclose(similarities(*factors(known, ids)), slow.max() - slow, atol=1e-6)


def test_weights_are_the_sizes_of_clusters_and_add_up_to_the_class():
    known = evidence()
    found = Craig().choose(known, 0.3)
    for c in range(3):
        members = (known.labels_N == c).nonzero().squeeze(1)
        here = known.labels_N[found.ids] == c
        assert float(found.weights[here].sum()) == len(members) == 20
        similarity = similarities(*factors(known, members))
        places = [members.tolist().index(i) for i in found.ids[here].tolist()]
        counts = [0] * len(places)
        for row in similarity[:, places].tolist():
            counts[row.index(max(row))] += 1
        assert found.weights[here].tolist() == counts
    assert float(found.weights.min()) >= 1


def test_the_weighted_gradient_is_nearer_that_of_all_than_without_weights():
    known = evidence(num_samples=300, seed=3)
    errors, features = factors(known, torch.arange(300))
    g = (errors.unsqueeze(2) * features.unsqueeze(1)).flatten(1)
    found = Craig().choose(known, 0.2)
    weights = found.weights.double() / found.weights.double().mean()
    with_weights = (weights.unsqueeze(1) * g[found.ids]).mean(0)
    assert (with_weights - g.mean(0)).norm() < 0.5 * (g[found.ids].mean(0) - g.mean(0)).norm()


def test_the_order_of_the_weights_is_that_of_the_ids():
    # One class has two tight clusters of gradients, of 9 and 3 samples.
    features = torch.cat([randn(9, 2, seed=1) * 0.01, randn(3, 2, seed=2) * 0.01 + 20, randn(4, 2, seed=3)]).double()
    labels = (torch.arange(16) >= 12).long()
    for seed in range(6):
        order = torch.randperm(16, generator=generator(seed))
        found = Craig().choose(Evidence(labels[order], 2, features[order], torch.zeros(16, 2).double()), 0.17)
        sizes = {int(order[i]): weight for i, weight in zip(found.ids.tolist(), found.weights.tolist(), strict=True)}
        assert {(i < 9, i < 12, weight) for i, weight in sizes.items()} == {
            (True, True, 9.0),
            (False, True, 3.0),
            (False, False, 4.0),
        }


def test_a_large_class_is_chosen_from_in_parts():
    known = evidence()
    found = Craig(block=7).choose(known, 0.5, seed=2)
    assert torch.bincount(known.labels_N[found.ids]).tolist() == [10, 10, 10]
    assert float(found.weights.sum()) == 60
    assert not torch.equal(found.ids, Craig().choose(known, 0.5, seed=2).ids)
    assert len(Craig(block=1).choose(known, 0.3)) == 18
