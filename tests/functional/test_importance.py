"""Importance, its noise, and which samples are retained by it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfway import functional as PF
from tests.helpers import reference
from tests.helpers.precision import DTYPES, assert_close, randn

# ---------------------------------------------------------------------------------------------------- importance


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


# -------------------------------------------------------------------------------------------------------- retain


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_finite_finds_a_single_value_that_is_not(dtype: torch.dtype, bad: float) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([[largest, -largest], [0.0, 1.0]], dtype=dtype)  # their sum and products would overflow
    assert PF.all_finite(values)
    values[1, 0] = bad
    assert not PF.all_finite(values)
