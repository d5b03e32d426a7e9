"""Clusters of samples and how they move the centroids, against slow loops and by hand."""

import pytest
import torch

from halfway import functional as PF
from tests.helpers import reference
from tests.helpers.precision import DTYPES, assert_close, randn


@pytest.mark.parametrize("dtype", DTYPES)
def test_assign_and_cluster_sums_match_the_reference(dtype):
    x, centroids = randn(100, 5, dtype=dtype), randn(12, 5, seed=1, dtype=dtype)
    nearest = PF.assign(x, centroids)
    assert nearest.dtype == torch.int64
    assert nearest.tolist() == reference.assign(x, centroids).tolist()
    sums, arrivals = PF.cluster_sums(x, centroids)
    expected_sums, expected_arrivals = reference.cluster_sums(x, centroids)
    assert_close(sums, expected_sums)
    assert arrivals.dtype == torch.int64
    assert arrivals.tolist() == expected_arrivals.tolist()


def test_cluster_sums_by_hand():
    centroids = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 50.0]])
    x = torch.tensor([[1.0, 1.0], [8.0, 1.0], [-2.0, 3.0]])
    assert PF.assign(x, centroids).tolist() == [0, 1, 0]
    sums, arrivals = PF.cluster_sums(x, centroids)
    assert sums.tolist() == [[-1.0, 4.0], [8.0, 1.0], [0.0, 0.0]]
    assert arrivals.tolist() == [2, 1, 0]


def test_assignment_is_euclidean_and_ignores_the_spread_of_the_dimensions():
    centroids = torch.tensor([[0.0, 0.0], [100.0, 1.0]])
    assert PF.assign(torch.tensor([[49.0, 1.0]]), centroids).tolist() == [0]


def test_cluster_sums_add_up_over_parts_of_a_batch():
    x, centroids = randn(40, 3), randn(6, 3, seed=1)
    sums, arrivals = PF.cluster_sums(x, centroids)
    parts = [PF.cluster_sums(part, centroids) for part in (x[:7], x[7:])]
    assert_close(parts[0][0] + parts[1][0], sums)
    assert torch.equal(parts[0][1] + parts[1][1], arrivals)


def test_cluster_sums_keep_their_precision_under_autocast():
    x, centroids = randn(64, 16).float(), randn(8, 16, seed=1).float()
    with torch.autocast("cpu", torch.bfloat16):
        sums, _ = PF.cluster_sums(x, centroids)
    assert sums.dtype == torch.float32
    assert_close(sums, reference.cluster_sums(x, centroids)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["convex", "as_printed"])
@pytest.mark.parametrize("beta", [0.0, 0.01, 0.9])
def test_update_matches_the_reference(beta, rule, dtype):
    x, centroids = randn(60, 5, dtype=dtype), 2 * randn(40, 5, seed=1, dtype=dtype)
    counts = torch.randint(1, 1000, (40,), generator=torch.Generator().manual_seed(2))
    sums, arrivals = PF.cluster_sums(x, centroids)
    assert 0 in arrivals
    expected_centroids, expected_counts = reference.update_centroids(centroids, counts, sums, arrivals, beta, rule)
    new_centroids, new_counts = PF.update_centroids(centroids, counts, sums, arrivals, beta, rule)
    assert_close(new_centroids, expected_centroids)
    assert new_counts.tolist() == expected_counts.tolist()


@pytest.mark.parametrize(("rule", "expected"), [("convex", 2.2), ("as_printed", 5.5 / 6)])
def test_update_by_hand(rule, expected):
    """n = 4, c = 1, two samples that sum to 6, beta = 1/4: (1 + 4.5) / (1 + 1.5), or / (4 + 2) as printed."""
    centroids, counts = PF.update_centroids(
        torch.tensor([[1.0]]), torch.tensor([4]), torch.tensor([[6.0]]), torch.tensor([2]), 0.25, rule
    )
    assert_close(centroids, [[expected]])
    assert counts.tolist() == [6]


def test_samples_on_their_centroid_do_not_move_it():
    centroids = randn(3, 2)
    x = centroids.repeat(4, 1)
    new_centroids, counts = PF.update_centroids(centroids, torch.tensor([1, 50, 10**6]), *PF.cluster_sums(x, centroids))
    assert_close(new_centroids, centroids)
    assert counts.tolist() == [5, 54, 10**6 + 4]


def test_a_centroid_at_which_nothing_arrives_keeps_its_bits():
    centroids = randn(2, 3).float()
    none = torch.zeros(2, dtype=torch.int64)
    for counts in (torch.tensor([7, 10**9]), torch.tensor([0, 0])):
        new_centroids, new_counts = PF.update_centroids(centroids, counts, torch.zeros(2, 3), none)
        assert torch.equal(new_centroids, centroids)
        assert torch.equal(new_counts, counts)


@pytest.mark.parametrize("rule", ["convex", "as_printed"])
def test_counting_goes_on_by_one_beyond_what_float32_can_count(rule):
    centroids, sums = torch.zeros(2, 1), torch.tensor([[1.0], [0.0]])
    counts, arrivals = torch.tensor([10**9, 2**24]), torch.tensor([1, 1])
    new_centroids, new_counts = PF.update_centroids(centroids, counts, sums, arrivals, 0.01, rule)
    assert new_counts.dtype == torch.int64
    assert new_counts.tolist() == [10**9 + 1, 2**24 + 1]
    expected, _ = reference.update_centroids(centroids, counts, sums, arrivals, 0.01, rule)
    assert_close(new_centroids, expected, atol=0)  # about 1e-7: small but not lost


def test_an_unknown_update_rule_is_named_with_the_choices():
    zeros, counts = torch.zeros(2, 1), torch.ones(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="unknown update rule 'mean'; choose 'convex' or 'as_printed'"):
        PF.update_centroids(zeros, counts, zeros, counts, rule="mean")
