"""Features as representations (Eq. 1), against slow loops and by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfway import functional as PF
from tests.helpers import reference
from tests.helpers.precision import DTYPES, assert_close, randn


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


def test_representation_and_density_keep_their_precision_under_autocast():
    x, centroids = randn(8, 16, 3, 3).float(), randn(8, 12, seed=1).float()
    with torch.autocast("cpu", torch.bfloat16):
        log_f = PF.log_density(PF.represent(x, 12), centroids)
    assert log_f.dtype == torch.float32
    assert_close(log_f, reference.log_density(reference.represent(x, 12, 1), centroids))
