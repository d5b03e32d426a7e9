"""Glister: against autograd on the last layer, and a slow loop of rounds."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from halfway.coresets import Evidence, Glister
from halfway.coresets.choosing import tie_breaker
from halfway.coresets.greedy.glister import turns
from tests.helpers.draws import randn
from tests.helpers.evidence import evidence


def slow_glister(known, counts, lr, rounds, seed):
    """Gradients of an explicit layer, one sample at a time."""
    source, C = tie_breaker(seed), known.num_classes
    judges, candidates = [], []
    for c in range(known.num_classes):
        ids = (known.labels_N == c).nonzero().squeeze(1)
        ids = ids[torch.randperm(len(ids), generator=source)].tolist()
        judges += ids[:2]
        candidates.append(ids[2:])
    phi = torch.cat([known.features_ND, torch.ones(known.num_samples, 1).double()], 1)
    shape = (known.num_classes, phi.shape[1])

    def gradient(ids, delta):
        delta = delta.clone().requires_grad_()
        loss = F.cross_entropy(known.logits_NC[ids] + phi[ids] @ delta.T, known.labels_N[ids])
        return torch.autograd.grad(loss, delta)[0]

    zero = torch.zeros(shape).double()
    own = {i: gradient([i], zero) for i in range(known.num_samples)}
    # Whose turn it is: a class's k-th sample comes at the share k / n of the way, equal ones class by class.
    turns = sorted((Fraction(2 * C * k + 2 * c + 1, 2 * C * n), c) for c, n in enumerate(counts) for k in range(n))
    chosen: list[int] = []
    for r in range(rounds):
        delta = -lr / sum(counts) * sum((own[i] for i in chosen), zero)
        G = gradient(judges, delta)
        mine = [c for _, c in turns[len(turns) * r // rounds : len(turns) * (r + 1) // rounds]]
        for c in range(C):
            share = mine.count(c)
            rest = [i for i in candidates[c] if i not in chosen]
            chosen += sorted(rest, key=lambda i: -float((own[i] * G).sum()))[:share]
    return sorted(chosen), judges


@pytest.mark.parametrize("lr", [0.1, 50.0])
@pytest.mark.parametrize("rounds", [10, 25])  # in the latter each class adds less than a sample per round
def test_the_rounds_are_those_of_a_slow_loop(lr, rounds):
    known = evidence()
    found = Glister(every=1 / rounds, lr=lr).choose(known, 0.5, seed=4)
    expected, judges = slow_glister(known, [10, 10, 10], lr, rounds, 4)
    assert found.ids.tolist() == expected
    assert not set(judges) & set(expected)


@pytest.mark.parametrize("counts", [[50] * 10, [500] * 4, [7, 13, 29, 101], [1, 1, 640], [3, 4]])
def test_every_round_adds_the_same_share_of_the_budget_and_classes_keep_pace(counts):
    rounds, total = turns(counts, 100), sum(counts)
    assert len(rounds) == 100
    sizes = [sum(shares.values()) for shares in rounds]
    assert set(sizes) <= {total // 100, -(-total // 100)}
    added = [0] * len(counts)
    for r, shares in enumerate(rounds):
        for c, share in shares.items():
            added[c] += share
        for c, count in enumerate(counts):
            assert abs(added[c] - count * (r + 1) / 100) <= 1 + count / total
    assert added == counts


def test_renewing_the_gradient_matters():
    known = evidence()
    once = Glister(every=1.0, lr=50.0).choose(known, 0.5, seed=4).ids
    often = Glister(every=0.1, lr=50.0).choose(known, 0.5, seed=4).ids
    assert not torch.equal(once, often)


def test_samples_that_lower_the_validation_loss_are_chosen_before_wrong_labels():
    labels = torch.arange(80) % 2
    features = F.one_hot(labels, 2).double() + 0.1 * randn(80, 2, seed=3).double()
    wrong = torch.arange(80) < 20
    features[wrong] = features[wrong].flip(1)
    known = Evidence(labels, 2, features, torch.zeros(80, 2).double())
    found = Glister().choose(known, 0.5).ids
    assert int(wrong[found].sum()) == 0


def test_the_validation_samples_are_not_there_to_be_chosen():
    with pytest.raises(ValueError, match=r"19 of 20 samples .* 2 are set aside .* keep below 0\.9, or a smaller valid"):
        Glister().choose(evidence(), 0.95)
    assert len(Glister(validation=0.05).choose(evidence(), 0.95)) == 57
