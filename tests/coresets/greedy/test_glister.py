"""Glister: against autograd on the last layer, and a slow loop of rounds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from halfway.coresets import Evidence, Glister
from halfway.coresets.choosing import tie_breaker
from tests.helpers.draws import randn
from tests.helpers.evidence import evidence


def slow_glister(known, counts, lr, rounds, seed):
    """Gradients of an explicit layer, one sample at a time."""
    source = tie_breaker(seed)
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
    chosen: list[int] = []
    for r in range(rounds):
        delta = -lr / sum(counts) * sum((own[i] for i in chosen), zero)
        G = gradient(judges, delta)
        for c, count in enumerate(counts):
            share = count * (r + 1) // rounds - count * r // rounds
            rest = [i for i in candidates[c] if i not in chosen]
            chosen += sorted(rest, key=lambda i: -float((own[i] * G).sum()))[:share]
    return sorted(chosen), judges


@pytest.mark.parametrize("lr", [0.1, 50.0])
def test_the_rounds_are_those_of_a_slow_loop(lr):
    known = evidence()
    found = Glister(every=0.1, lr=lr).choose(known, 0.5, seed=4)
    expected, judges = slow_glister(known, [10, 10, 10], lr, 10, 4)
    assert found.ids.tolist() == expected
    assert not set(judges) & set(expected)


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
