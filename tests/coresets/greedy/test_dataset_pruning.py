"""Dataset Pruning: greedy against its definition, swaps against all subsets, projections against dot products."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from halfway.coresets import DatasetPruning, Evidence
from halfway.coresets.greedy.dataset_pruning import _Projection, remove, swap
from halfway.coresets.last_layer import Curvature, factors
from tests.helpers.draws import generator, randn
from tests.helpers.evidence import evidence


def norm(rows, removed):
    return float(rows[removed].sum(0).norm())


@pytest.mark.parametrize("seed", range(3))
def test_each_step_keeps_the_norm_of_the_sum_smallest(seed):
    rows = randn(20, 5, seed=seed).double()
    chosen: list[int] = []
    for _ in range(12):
        rest = [i for i in range(20) if i not in chosen]
        chosen.append(min(rest, key=lambda i: float(rows[[*chosen, i]].sum(0).norm())))
    assert remove(rows, 12).nonzero().squeeze(1).tolist() == sorted(chosen)


@pytest.mark.parametrize("seed", range(8))
def test_swaps_never_make_it_worse_and_stop_where_no_single_one_helps(seed):
    rows = randn(12, 4, seed=seed).double()
    before = remove(rows, 5)
    norms = [norm(rows, swap(rows, before, most)) for most in range(6)]
    assert norms == sorted(norms, reverse=True)
    assert norms[0] == norm(rows, before)
    after = swap(rows, before, 100)
    assert int(after.sum()) == 5
    best = min(norm(rows, list(chosen)) for chosen in itertools.combinations(range(12), 5))
    assert best <= norm(rows, after) <= norm(rows, before)
    for out, back in itertools.product((~after).nonzero().flatten(), after.nonzero().flatten()):
        other = after.clone()
        other[out], other[back] = True, False
        assert norm(rows, other) >= norm(rows, after) - 1e-12


def test_swaps_come_near_the_best_of_all_subsets():
    ratios = {"greedy": 0.0, "swapped": 0.0}
    for seed in range(20):
        rows = randn(10, 2, seed=seed).double()
        worst = sorted(float(rows[list(c)].sum(0).norm()) for c in itertools.combinations(range(10), 4))
        greedy = remove(rows, 4)
        ratios["greedy"] += sum(value < norm(rows, greedy) - 1e-12 for value in worst) / len(worst) / 20
        ratios["swapped"] += (
            sum(value < norm(rows, swap(rows, greedy, 50)) - 1e-12 for value in worst) / len(worst) / 20
        )
    assert ratios["swapped"] < 0.03  # the share of all subsets that is better
    assert ratios["swapped"] < 0.7 * ratios["greedy"]


def test_projected_dot_products_are_right_on_average():
    left, right = randn(2, 7, seed=1), randn(2, 40, seed=2)
    exact = (left @ left.T) * (right @ right.T)
    largest = float(exact.diagonal().max())
    found = torch.stack(
        [rows @ rows.T for rows in (_Projection(7, 40, 256, generator(s))(left, right) for s in range(200))]
    )
    assert (found.mean(0) - exact).abs().max() < 0.05 * largest
    assert (found - exact).abs().max() < largest  # a single one is off by less than the largest square


def test_little_is_not_projected():
    left, right = randn(3, 4, seed=1), randn(3, 5, seed=2)
    rows = _Projection(4, 5, 256, generator())(left, right)
    assert torch.allclose(rows, torch.stack([torch.kron(a, b) for a, b in zip(left, right, strict=True)]).double())


def test_the_retained_are_those_that_are_not_removed():
    known = evidence()
    method = DatasetPruning(damping=0.1)
    found = method.choose(known, 0.6)
    curvature = Curvature(known, 0.1)
    for c in range(3):
        ids = (known.labels_N == c).nonzero().squeeze(1)
        errors, features = curvature.solve(*factors(known, ids))
        rows = (errors.unsqueeze(2) * features.unsqueeze(1)).flatten(1).double()
        kept = torch.isin(ids, found.ids)
        assert int((~kept).sum()) == 8
        draws = [norm(rows, torch.randperm(20, generator=generator(s))[:8]) for s in range(50)]
        assert norm(rows, ~kept) < min(draws)


def influences(known, damping):
    """(N, C E): H^-1 g with a dense H, and g by autograd; nothing of the library is used."""
    C, ones = known.num_classes, torch.ones(known.num_samples, 1).double()
    features = torch.cat([known.features_ND.double(), ones], 1)
    p = known.logits_NC.double().softmax(1)
    B = torch.stack([torch.diag(q) - torch.outer(q, q) for q in p]).mean(0)
    A = torch.stack([torch.outer(f, f) for f in features]).mean(0)
    B, A = (m + damping * m.trace() / len(m) * torch.eye(len(m)).double() for m in (B, A))
    H = torch.kron(B, A)
    rows = []
    for f, logits, label in zip(features, known.logits_NC.double(), known.labels_N, strict=True):
        move = torch.zeros(C, len(f), dtype=torch.float64, requires_grad=True)
        loss = F.cross_entropy((logits + move @ f)[None], label[None])
        rows.append(torch.linalg.solve(H, torch.autograd.grad(loss, move)[0].flatten()))
    return torch.stack(rows)


def test_the_choice_is_that_of_a_slow_search_with_a_dense_curvature():
    known = evidence()
    found, rows = DatasetPruning(damping=0.1, swaps=0).choose(known, 0.6), influences(known, 0.1)
    for c in range(3):
        ids = (known.labels_N == c).nonzero().squeeze(1).tolist()
        removed: list[int] = []
        for _ in range(8):
            rest = [i for i in ids if i not in removed]
            removed.append(min(rest, key=lambda i: float(rows[[*removed, i]].sum(0).norm())))
        assert sorted(set(ids) & set(found.ids.tolist())) == sorted(set(ids) - set(removed))


def test_projected_influences_still_cancel():
    """With more than 256 numbers per sample, as in every real network."""
    known = evidence(num_samples=240, width=100)
    found, whole = (DatasetPruning(damping=0.1, dim=dim).choose(known, 0.5).ids for dim in (256, 1024))
    rows = influences(known, 0.1)
    assert rows.shape[1] == 303
    for c in range(3):
        ids = (known.labels_N == c).nonzero().squeeze(1)
        projected, exact = (norm(rows, ids[~torch.isin(ids, chosen)]) for chosen in (found, whole))
        draws = [norm(rows, ids[torch.randperm(80, generator=generator(s))[:40]]) for s in range(20)]
        assert projected < 0.85 * min(draws)
        assert projected < 1.4 * exact


def test_without_swaps_it_is_greedy():
    known = evidence()
    assert DatasetPruning(swaps=0).choose(known, 0.5).ids.tolist() != DatasetPruning().choose(known, 0.5).ids.tolist()


def test_opposite_influences_go_together():
    # Two samples that cancel exactly, and three that all pull one way.
    rows = torch.tensor([[3.0, 0.1], [-3.0, -0.1], [1.0, 0.0], [1.1, 0.0], [1.2, 0.0]]).double()
    removed = swap(rows, remove(rows, 2), 10)
    assert removed.tolist() == [True, True, False, False, False]


def test_one_class_of_equal_samples_is_no_problem():
    known = Evidence(torch.zeros(10, dtype=torch.int64), 1, torch.ones(10, 3), torch.zeros(10, 1))
    assert len(DatasetPruning().choose(known, 0.3)) == 3
