"""Influence: against a dense Gauss-Newton matrix, where its factors are exact."""

from __future__ import annotations

import pytest
import torch

from halfway.coresets import Evidence, Influence
from halfway.coresets.last_layer import Curvature
from tests.helpers.draws import randn
from tests.helpers.evidence import evidence

DAMPING = 0.05


def pieces(known):
    """p and [phi, 1] of every sample."""
    p = known.logits_NC.softmax(1)
    return p, torch.cat([known.features_ND, torch.ones(known.num_samples, 1).double()], 1)


def damped(matrix):
    return matrix + DAMPING * matrix.diagonal().mean() * torch.eye(len(matrix)).double()


def dense(known):
    """The damped Gauss-Newton matrix, summed sample by sample, and the gradients, from autograd."""
    p, phi = pieces(known)
    B = sum(torch.diag(row) - torch.outer(row, row) for row in p) / len(p)
    A = sum(torch.outer(row, row) for row in phi) / len(phi)
    exact = sum(torch.kron(torch.diag(q) - torch.outer(q, q), torch.outer(f, f)) for q, f in zip(p, phi, strict=True))
    return exact / len(p), torch.kron(B, A), torch.kron(damped(B), damped(A))


def gradients(known):
    _, phi = pieces(known)
    weight = torch.zeros(known.num_classes, phi.shape[1]).double().requires_grad_()
    rows = []
    for logits, label, f in zip(known.logits_NC, known.labels_N, phi, strict=True):
        loss = torch.nn.functional.cross_entropy(logits + weight @ f, label)
        rows.append(torch.autograd.grad(loss, weight)[0].flatten())
    return torch.stack(rows)


def same_predictions():
    """All samples have the same p, so that the factors are exact."""
    labels = torch.arange(30) % 3
    logits = torch.tensor([0.5, -0.2, 1.0]).double().expand(30, 3).clone()
    return Evidence(labels, 3, randn(30, 4, seed=7).double(), logits)


def test_the_factors_are_exact_where_predictions_are_equal():
    exact, product, _ = dense(same_predictions())
    assert torch.allclose(exact, product, atol=1e-12)
    exact, product, _ = dense(evidence())
    assert not torch.allclose(exact, product, atol=1e-3)  # elsewhere they approximate


@pytest.mark.parametrize("known", [same_predictions(), evidence()])
def test_the_score_is_that_of_a_dense_solve(known):
    _, _, H = dense(known)
    slow = torch.linalg.solve(H, gradients(known).T).norm(dim=0)
    # The sums over features are taken in at least float32.
    assert torch.allclose(Influence(DAMPING).score(known).double(), slow, rtol=1e-4)


def test_blocks_do_not_matter(monkeypatch):
    known = evidence()
    whole = Influence().score(known)
    monkeypatch.setattr("halfway.coresets.last_layer._BLOCK", 7)
    assert torch.allclose(Influence().score(known), whole, rtol=1e-6)


def test_the_largest_influence_is_that_of_a_wrong_label_far_away():
    features = torch.cat([randn(40, 3, seed=1) * 0.1, torch.tensor([[3.0, 0.0, 0.0]])]).double()
    labels = torch.arange(41) % 2
    logits = torch.nn.functional.one_hot(labels, 2).double() * 3
    logits[40] = logits[40].flip(0)
    assert int(Influence().score(Evidence(labels, 2, features, logits)).argmax()) == 40


def test_a_proxy_that_is_certain_of_everything_still_gives_finite_scores():
    labels = torch.arange(20) % 2
    logits = torch.nn.functional.one_hot(labels, 2).double() * 2000
    known = Evidence(labels, 2, torch.zeros(20, 3).double(), logits)
    assert Influence().score(known).isfinite().all()
    curvature = Curvature(known, 0.1)
    assert all(part.isfinite().all() for part in curvature.solve(torch.ones(1, 2).double(), torch.ones(1, 4).double()))
