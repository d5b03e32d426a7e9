"""Scores of single samples: closed forms, and what public code gets wrong."""

from __future__ import annotations

import math

import pytest
import torch

from halfway.coresets import (
    AUM,
    EL2N,
    SVP,
    Checkpoint,
    Dynamics,
    Evidence,
    Forgetting,
    GraNd,
    GraNdLast,
    Moderate,
    MoSo,
    RandomCoreset,
    RetentionRecord,
    ShortRun,
)
from tests.helpers.draws import generator, within
from tests.helpers.evidence import evidence


def test_a_random_coreset_is_uniform_within_classes():
    counts, labels = torch.zeros(20), torch.arange(20) % 2
    for seed in range(300):
        counts[RandomCoreset().choose(Evidence(labels, 2), 0.3, seed=seed).ids] += 1
    assert all(within(count / 300, 0.3, 300) for count in counts.tolist())


@pytest.mark.parametrize(
    ("measure", "slow"),
    [
        ("least_confidence", lambda p: 1 - max(p)),
        ("entropy", lambda p: -sum(v * math.log(v) for v in p)),
        ("margin", lambda p: 1 - (sorted(p)[-1] - sorted(p)[-2])),
    ],
)
def test_svp_retains_the_least_certain(measure, slow):
    known = evidence()
    found = SVP(measure).score(known)
    expected = [slow(row) for row in known.logits_NC.double().softmax(1).tolist()]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    sure = Evidence(torch.tensor([0, 0]), 2, logits_NC=torch.tensor([[9.0, 0.0], [0.1, 0.0]]))
    assert SVP(measure).choose(sure, 0.5, class_balance=False).ids.tolist() == [1]


def recorded(margins_by_visit):
    """Dynamics of two classes with the margins of (visits, N)."""
    record = Dynamics(len(margins_by_visit[0]))
    for row in margins_by_visit:
        logits = torch.tensor([[margin, 0.0] for margin in row])
        record.observe(torch.arange(len(row)), logits, torch.zeros(len(row), dtype=torch.int64))
    return Evidence(torch.zeros(len(margins_by_visit[0]), dtype=torch.int64), 2, dynamics=record)


def test_what_was_never_learned_counts_as_forgotten_infinitely_often():
    known = recorded([[1, -1, 1, -1], [1, -1, -1, 2], [1, -1, 1, 3], [1, -1, -1, 4]])
    assert Forgetting().score(known).tolist() == [0, math.inf, 2, 0]
    assert Forgetting().choose(known, 0.5, class_balance=False).ids.tolist() == [1, 2]


def test_aum_is_the_mean_margin_of_logits_and_the_lowest_are_retained():
    known = recorded([[30.0, 1.0, -2.0], [50.0, 3.0, 4.0]])
    assert AUM().score(known).tolist() == [-40.0, -2.0, -1.0]
    assert AUM().choose(known, 0.4, class_balance=False).ids.tolist() == [2]


@pytest.mark.parametrize("method", [Forgetting, AUM])
def test_a_sample_that_was_never_presented_is_an_error(method):
    record = Dynamics(3)
    record.observe(torch.tensor([0, 2]), torch.zeros(2, 2), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="never presented"):
        method().score(Evidence(torch.zeros(3, dtype=torch.int64), 2, dynamics=record))


def test_scores_of_short_runs_are_means_over_runs():
    known = evidence()
    for i in range(60):
        runs = [(float(r.error_norms_N[i]), float(r.feature_norms_N[i]), float(r.gradient_norms_N[i])) for r in
                known.short_runs]  # fmt: skip
        assert float(EL2N().score(known)[i]) == pytest.approx(sum(e for e, _, _ in runs) / 3)
        assert float(GraNd().score(known)[i]) == pytest.approx(sum(g for _, _, g in runs) / 3)
        assert float(GraNdLast().score(known)[i]) == pytest.approx(
            sum(e * math.sqrt(1 + f * f) for e, f, _ in runs) / 3
        )


def test_grand_of_the_last_layer_is_the_norm_of_its_gradient():
    source = generator(4)
    layer = torch.nn.Linear(5, 3).double()
    features = torch.randn(7, 5, generator=source, dtype=torch.float64)
    labels = torch.arange(7) % 3
    logits = layer(features)
    error = torch.nn.functional.one_hot(labels, 3) - logits.softmax(1)
    known = Evidence(labels, 3, short_runs=[ShortRun(error.norm(dim=1), features.norm(dim=1))])
    for i in range(7):
        loss = torch.nn.functional.cross_entropy(logits[i], labels[i])
        weight, bias = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
        slow = torch.cat([weight.flatten(), bias]).norm()
        assert float(GraNdLast().score(known)[i]) == pytest.approx(float(slow))


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


def test_a_retention_record_is_a_share_and_not_a_count():
    known = Evidence(
        torch.zeros(4, dtype=torch.int64),
        1,
        offered_N=torch.tensor([10, 2, 4, 8]),
        retained_N=torch.tensor([5, 2, 1, 6]),
    )
    assert RetentionRecord().score(known).tolist() == [0.5, 1.0, 0.25, 0.75]
    assert RetentionRecord().choose(known, 0.5).ids.tolist() == [1, 3]
    assert RetentionRecord("least").choose(known, 0.5).ids.tolist() == [0, 2]
    known.offered_N = torch.tensor([10, 0, 4, 8])
    with pytest.raises(ValueError, match="1 of 4 samples were never in a batch that was pruned"):
        RetentionRecord().score(known)
