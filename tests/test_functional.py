"""Eq. 1-9 against slow loops, SciPy and numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import gaussian_kde

from halfway import functional as PF
from tests.helpers import reference

DTYPES = [torch.float32, torch.float64]
RULES = ["silverman", "scott", "identity"]


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_close(actual, expected, **tolerance):
    """Equal shape and values: float64 to 1e-9, float32 to 1e-5 unless told otherwise."""
    expected = torch.as_tensor(np.asarray(expected), dtype=actual.dtype)
    small = 1e-9 if actual.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(actual, expected, **({"rtol": small, "atol": small} | tolerance))


# --- represent ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "dim", "channel_dim"),
    [
        ((3, 12, 2, 5), 4, 1),  # NCHW, equal bins
        ((3, 11, 2, 5), 4, 1),  # NCHW, overlapping bins
        ((3, 2, 5, 11), 4, 3),  # NHWC
        ((3, 2, 5, 11), 4, -1),
        ((3, 7, 10), 3, 2),  # tokens
        ((3, 7, 10), 3, 1),
        ((3, 10), 7, 1),
        ((3, 10), 1, -1),
        ((3, 2, 6, 2, 2), 4, 2),  # the channels in the middle of five axes
    ],
)
def test_represent_is_the_mean_over_positions_then_over_neighbouring_channels(shape, dim, channel_dim, dtype):
    features = randn(*shape, dtype=dtype)
    actual = PF.represent(features, dim, channel_dim)
    assert actual.dtype == dtype
    assert_close(actual, reference.represent(features, dim, channel_dim))


@settings(deadline=None, max_examples=60)
@given(channels=st.integers(1, 70), dim=st.integers(1, 70))
def test_represent_pools_any_number_of_channels_to_any_dim(channels, dim):
    features = randn(2, channels, seed=channels)
    actual = PF.represent(features, dim)
    assert actual.shape == (2, min(channels, dim))
    assert_close(actual, reference.represent(features, dim, 1))


def test_represent_by_hand():
    features = torch.tensor([[[1.0, 3.0], [10.0, 20.0], [4.0, 6.0], [-1.0, 1.0]]])  # (1, 4 channels, 2 positions)
    assert_close(PF.represent(features, 4), [[2.0, 15.0, 5.0, 0.0]])
    assert_close(PF.represent(features, 2), [[8.5, 2.5]])
    assert_close(PF.represent(features, 3), [[8.5, 10.0, 2.5]])  # bins [0, 2), [1, 3), [2, 4)
    assert_close(PF.represent(features, 2, channel_dim=2), [[3.5, 7.5]])


@pytest.mark.parametrize("dim", [64, 65, 128])
def test_represent_never_upsamples(dim):
    features = randn(4, 64)
    assert torch.equal(PF.represent(features, dim), features)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 20), (2, 20, 16, 16)])
def test_represent_averages_half_precision_features_in_float32(shape, dtype):
    features = (100 + randn(*shape)).to(dtype)
    actual = PF.represent(features, 8)
    assert actual.dtype == torch.float32
    assert_close(actual, reference.represent(features.double(), 8, 1))


def test_represent_does_not_overflow_on_large_float16_features():
    features = torch.full((1, 4, 8, 8), 60000.0, dtype=torch.float16)
    assert_close(PF.represent(features, 2), [[60000.0, 60000.0]], rtol=1e-3)


@pytest.mark.parametrize(("shape", "channel_dim"), [((2, 3, 4), 0), ((2, 3, 4), -3), ((2, 3), -2)])
def test_represent_refuses_the_batch_as_channels(shape, channel_dim):
    with pytest.raises(ValueError, match="or is the batch"):
        PF.represent(torch.zeros(shape), channel_dim=channel_dim)


def test_represent_refuses_an_axis_the_features_do_not_have():
    with pytest.raises((ValueError, IndexError)):
        PF.represent(torch.zeros(2, 3, 4, 5), channel_dim=5)


# --- bandwidth ------------------------------------------------------------------------------------


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


# --- log_density ----------------------------------------------------------------------------------


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


# --- importance -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("noise", [0.01, 1.0])
def test_importance_matches_the_reference_with_one_uniform_draw_per_sample(noise, dtype):
    log_f = 5 * randn(64, dtype=dtype)
    actual = PF.importance(log_f, noise, torch.Generator().manual_seed(3))
    alphas = noise * torch.rand(64, generator=torch.Generator().manual_seed(3), dtype=dtype)
    assert actual.dtype == dtype
    assert_close(actual, reference.importance(log_f, alphas))


def test_importance_by_hand_without_noise():
    f = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    assert_close(PF.importance(f.log(), noise=0).exp(), [2.0, 0.5, 1.0])


@pytest.mark.parametrize("noise", [0.01, 0.5])
def test_alpha_is_uniform_up_to_the_noise_and_differs_between_samples(noise):
    """alpha, recovered from I = 1 / (f + alpha max f), no matter how it was drawn."""
    f = torch.linspace(0.2, 0.8, 5000, dtype=torch.float64)
    alpha = (1 / PF.importance(f.log(), noise, torch.Generator().manual_seed(0)).exp() - f) / 0.8
    assert alpha.min() >= -1e-12
    assert alpha.max() <= noise
    assert_close(alpha.mean() / noise, 0.5, atol=0.02)
    assert_close(alpha.std() / noise, math.sqrt(1 / 12), atol=0.02)
    assert len(alpha.unique()) > 4900


def test_noise_reorders_samples_of_similar_density():
    log_f = torch.linspace(1, 1.001, 50, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    orders = {tuple(PF.importance(log_f, 0.01, generator).argsort().tolist()) for _ in range(10)}
    assert len(orders) == 10


def test_noise_never_overturns_a_gap_wider_than_its_bound():
    log_f = torch.tensor([1.0, 0.985]).log()
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        common, rare = PF.importance(log_f, 0.01, generator)
        assert rare > common


def test_noise_only_ever_lowers_the_importance():
    log_f = randn(50)
    assert (PF.importance(log_f, 0.01) < PF.importance(log_f, 0)).all()


def test_without_noise_the_importance_is_deterministic():
    log_f = randn(20)
    assert torch.equal(PF.importance(log_f, 0), -log_f)
    assert torch.equal(PF.importance(log_f, 0), PF.importance(log_f, 0))


def test_the_generator_alone_decides_the_noise():
    log_f = randn(20)
    a, b, c = (PF.importance(log_f, 0.01, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_a_given_generator_leaves_the_global_one_untouched():
    before = torch.get_rng_state()
    PF.importance(randn(20), 0.01, torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("log_f", [[-1e4, -2e4], [500.0, 499.0], [-5e29, -5e29], [0.0, -5e29]])
def test_importance_is_finite_for_densities_outside_the_range_of_float32(log_f):
    assert PF.importance(torch.tensor(log_f)).isfinite().all()


# --- retain ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "ratio", "expected"),
    [
        (128, 0.3, 90),
        (10, 0.0, 10),
        (10, 0.5, 5),
        (7, 0.4, 4),
        (256, 0.7, 77),
        (3, 0.99, 1),
        (1, 0.9, 1),
        (5, 0.5, 3),
    ],
)
def test_retained_count_by_hand(size, ratio, expected):
    assert PF.retained_count(size, ratio) == expected


def test_retained_count_matches_the_reference():
    for size in range(1, 200):
        for percent in range(0, 100, 5):
            assert PF.retained_count(size, percent / 100) == reference.retained_count(size, percent / 100)


def test_retain_by_hand():
    assert PF.retain(torch.tensor([0.1, 5.0, -2.0, 3.0, 4.0]), 3).tolist() == [1, 3, 4]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_retain_gives_exactly_count_sorted_indices_whatever_ties(data):
    values = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=40))
    count = data.draw(st.integers(1, len(values)))
    retained = PF.retain(torch.tensor(values, dtype=torch.float32), count).tolist()
    assert retained == sorted(set(retained))
    assert len(retained) == count
    assert sorted(values[i] for i in retained) == sorted(values)[-count:]


@pytest.mark.parametrize("count", [0, -1, 6])
def test_retain_refuses_an_impossible_count(count):
    with pytest.raises(ValueError, match=f"cannot retain {count} of 5 samples"):
        PF.retain(torch.zeros(5), count)


def test_shuffling_the_batch_retains_the_same_samples():
    centroids, x = randn(16, 4), randn(40, 4, seed=1)
    ids = torch.randperm(40, generator=torch.Generator().manual_seed(2))

    def retained(batch):
        return PF.retain(PF.importance(PF.log_density(batch, centroids), noise=0), 13)

    assert sorted(ids[retained(x[ids])].tolist()) == retained(x).tolist()


def test_duplicates_are_pruned_before_isolated_samples():
    twins = torch.tensor([[1.0, 1.0]]).repeat(12, 1)
    isolated = torch.tensor([[9.0, -7.0], [-8.0, 6.0], [-9.0, -9.0], [8.0, 9.0]])
    batch = torch.cat([twins[:5], isolated[:2], twins[5:], isolated[2:]])
    centroids = torch.cat([twins[:6], isolated[:2]])
    counts = torch.tensor([1] * 8)
    for seed in range(20):
        log_f = PF.log_density(batch, centroids, counts)
        scores = PF.importance(log_f, 0.01, torch.Generator().manual_seed(seed))
        retained = PF.retain(scores, PF.retained_count(16, 0.5)).tolist()
        assert len(retained) == 8
        assert {5, 6, 14, 15} <= set(retained)


# --- clusters and centroids -----------------------------------------------------------------------


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


def test_representation_and_density_keep_their_precision_under_autocast():
    x, centroids = randn(8, 16, 3, 3).float(), randn(8, 12, seed=1).float()
    with torch.autocast("cpu", torch.bfloat16):
        log_f = PF.log_density(PF.represent(x, 12), centroids)
    assert log_f.dtype == torch.float32
    assert_close(log_f, reference.log_density(reference.represent(x, 12, 1), centroids))


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
