"""Bandwidth and log density, against slow loops, SciPy and numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import gaussian_kde

from halfway import functional as PF
from tests.helpers import reference
from tests.helpers.precision import DTYPES, RULES, assert_close, randn

# ----------------------------------------------------------------------------------------------------- bandwidth


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("C", "D"), [(1, 3), (2, 1), (16, 5), (64, 128)])
def test_bandwidth_matches_the_reference(C, D, rule, dtype):
    centroids = 3 + randn(C, D, dtype=dtype) * torch.linspace(0.1, 10, D, dtype=dtype)
    assert_close(PF.bandwidth(centroids, rule), reference.bandwidth(centroids, rule))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("silverman", 1.304057514), ("scott", 1.231144413), ("identity", 1.0)],
)
def test_bandwidth_by_hand_in_one_dimension(rule, expected):
    """C = 2, D = 1, sigma = sqrt(2): (4/6)^(1/5) sqrt(2) and 2^(-1/5) sqrt(2)."""
    assert_close(PF.bandwidth(torch.tensor([[0.0], [2.0]], dtype=torch.float64), rule), [expected])


def test_silverman_by_hand_in_two_dimensions():
    """C = 2, D = 2, sigma = (sqrt(2), sqrt(8)), factor 2^(-1/6)."""
    centroids = torch.tensor([[0.0, 0.0], [2.0, 4.0]], dtype=torch.float64)
    assert_close(PF.bandwidth(centroids), [1.259921050, 2.519842100])


def test_a_constant_dimension_gets_a_thousandth_of_the_mean_spread():
    centroids = torch.tensor([[0.0, 5.0], [2.0, 5.0]], dtype=torch.float64)
    scale = PF.bandwidth(centroids)
    assert_close(scale[1] / scale[0], 0.0005)  # mean spread: half of the first dimension's


def test_bandwidth_is_positive_and_finite_when_nothing_varies():
    assert_close(PF.bandwidth(torch.full((4, 2), 3.0)), reference.bandwidth(np.full((4, 2), 3.0), "silverman"), atol=0)
    assert_close(PF.bandwidth(torch.zeros(4, 2)), reference.bandwidth(np.zeros((4, 2)), "silverman"), atol=0)


def test_an_unknown_bandwidth_is_named_with_the_choices():
    with pytest.raises(ValueError, match="unknown bandwidth 'epanechnikov'; choose 'silverman', 'scott'"):
        PF.bandwidth(torch.zeros(2, 2), "epanechnikov")


# --------------------------------------------------------------------------------------------------- log_density


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("C", "D"), [(1, 4), (7, 1), (32, 6), (8, 128)])
def test_log_density_matches_the_reference(C, D, rule, counted, dtype):
    centroids, x = 2 * randn(C, D, dtype=dtype), 2 * randn(5, D, seed=1, dtype=dtype)
    counts = torch.randint(1, 100, (C,), generator=torch.Generator().manual_seed(2)) if counted else None
    expected = reference.log_density(x, centroids, counts, rule)
    actual = PF.log_density(x, centroids, counts, rule)
    assert actual.dtype == dtype
    assert_close(actual, expected)


def test_log_density_by_hand():
    """Standard normal densities: N(0) = 0.3989422804, N(2) = 0.0539909665."""
    centroids = torch.tensor([[0.0], [2.0]], dtype=torch.float64)
    x = torch.tensor([[0.0], [2.0]], dtype=torch.float64)
    unweighted = PF.log_density(x, centroids, None, "identity").exp()
    assert_close(unweighted, [0.22646662345, 0.22646662345])  # (N(0) + N(2)) / 2
    weighted = PF.log_density(x, centroids, torch.tensor([3, 1]), "identity").exp()
    assert_close(weighted, [0.15635222597, 0.07011439750])  # (3/4 N(0) + 1/4 N(2)) / 2 and the reverse


def orthogonal_data(n, d):
    """n points whose sample covariance is diagonal, with a different spread in each dimension."""
    noise = np.random.default_rng(0).normal(size=(n, d))
    basis, _ = np.linalg.qr(np.column_stack([np.ones(n), noise]))
    data = basis[:, 1:] * np.linspace(1, 5, d) * math.sqrt(n) + np.arange(d)
    off_diagonal = np.cov(data.T).reshape(d, d) - np.diag(np.atleast_2d(np.cov(data.T)).diagonal())
    assert np.abs(off_diagonal).max() < 1e-12
    return data


@pytest.mark.parametrize("rule", ["silverman", "scott"])
@pytest.mark.parametrize(("C", "D"), [(20, 1), (20, 3), (40, 6)])
def test_log_density_agrees_with_scipy_where_the_covariance_is_diagonal(C, D, rule):
    centroids = orthogonal_data(C, D)
    x = centroids[:8] + np.random.default_rng(1).normal(size=(8, D))
    expected = gaussian_kde(centroids.T, bw_method=rule).logpdf(x.T)
    actual = PF.log_density(torch.from_numpy(x), torch.from_numpy(centroids), None, rule)
    assert_close(actual, expected)
    # Eq. 9 weighs with n_j / sum n on top of Eq. 4's 1 / C: equal counts are one more factor 1 / C.
    counts = torch.full((C,), 7)
    weighted = PF.log_density(torch.from_numpy(x), torch.from_numpy(centroids), counts, rule)
    assert_close(weighted, expected - math.log(C))


@pytest.mark.parametrize(("counts", "integral"), [(None, 1.0), ([5, 1, 1, 13], 0.25)])
def test_the_density_integrates_to_one_without_weights_and_to_one_over_c_with_them(counts, integral):
    centroids = torch.tensor([[-1.0], [0.5], [2.0], [7.0]], dtype=torch.float64)
    x = torch.linspace(-40, 50, 20001, dtype=torch.float64)
    f = PF.log_density(x.unsqueeze(1), centroids, None if counts is None else torch.tensor(counts)).exp()
    assert_close(torch.trapezoid(f, x), integral)


def test_only_the_proportions_of_the_counts_matter():
    centroids, x = randn(4, 3), randn(6, 3, seed=1)
    counts = torch.tensor([1, 2, 3, 4])
    assert_close(PF.log_density(x, centroids, 10**9 * counts), PF.log_density(x, centroids, counts))


def test_a_centroid_that_stands_for_nothing_adds_no_density():
    centroids, x = randn(4, 3), randn(6, 3, seed=1)
    counts = torch.tensor([2, 0, 1, 5])
    expected = reference.log_density(x, centroids, counts)
    assert_close(PF.log_density(x, centroids, counts), expected)


def test_the_more_samples_a_centroid_stands_for_the_denser_its_surroundings():
    centroids = torch.tensor([[-5.0], [5.0]])
    left, right = PF.log_density(centroids, centroids, torch.tensor([9, 1]), "identity")
    assert_close((left - right).exp(), 9.0)


def test_distances_do_not_cancel_far_from_the_origin():
    """|x|^2 - 2 x.c + |c|^2 in float32 loses all digits here; more than 25 rows would make cdist use it."""
    centroids = (1e4 + randn(32, 4)).float()
    x = centroids + 0.1 * randn(32, 4, seed=1).float()
    assert_close(PF.log_density(x, centroids), reference.log_density(x, centroids), rtol=1e-3)
    assert PF.assign(x, centroids).tolist() == reference.assign(x, centroids).tolist()


def test_512_dimensions_are_accurate_although_the_density_leaves_the_range_of_float32():
    centroids, x = 0.05 * randn(16, 512).float(), 0.05 * randn(8, 512, seed=1).float()
    log_f = PF.log_density(x, centroids)
    assert_close(log_f, reference.log_density(x, centroids))
    assert log_f.exp().isinf().any() or (log_f.exp() == 0).any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "centroids",
    [
        pytest.param(torch.zeros(8, 16), id="all zero"),
        pytest.param(torch.full((8, 16), 3.0), id="all equal"),
        pytest.param(randn(1, 16).float(), id="a single one"),
        pytest.param(randn(8, 16).float() * (torch.arange(16) > 7), id="half of the dimensions constant"),
        pytest.param(randn(4, 16).float().repeat(2, 1), id="duplicates"),
        pytest.param(1e-20 * randn(8, 16).float(), id="tiny"),
        pytest.param(1e15 * randn(8, 16).float(), id="huge"),
    ],
)
def test_log_density_is_finite_on_degenerate_centroids(centroids, rule):
    x = torch.cat([centroids, torch.zeros(1, 16), randn(4, 16).float(), torch.full((1, 16), 1e30)])
    log_f = PF.log_density(x, centroids, torch.full((len(centroids),), 10**9), rule)
    assert log_f.isfinite().all()
    assert PF.importance(log_f).isfinite().all()
    assert log_f[: len(centroids)].min() > log_f[-1]  # and still a ranking


def test_log_density_is_finite_up_to_the_documented_size():
    assert PF.log_density(randn(2, 4).float(), 1e18 * randn(8, 4).float()).isfinite().all()
