"""The density as the public code scores it: the mean of log kernels, and Gaussian noise."""

from __future__ import annotations

import math

import pytest
import torch

from halfway import functional as PF
from halfway.selectors import Candidates, Density, DensityPublic
from tests.helpers.densities import learnt
from tests.helpers.draws import generator, randn, within
from tests.helpers.remembered import through_a_file


def reference_score(x, centroids):
    """The mean over the centroids of log N(x; c_j, diag(s)), with Silverman's standard deviations as variances."""
    import numpy as np
    from scipy import stats

    x, c = x.double().numpy(), centroids.double().numpy()
    C, D = c.shape
    variance = (4 / ((D + 2) * C)) ** (1 / (D + 4)) * c.std(0, ddof=1)
    return np.mean([stats.multivariate_normal.logpdf(x, mean=c[j], cov=np.diag(variance)) for j in range(C)], axis=0)


@pytest.mark.parametrize(("size", "C", "D"), [(20, 16, 5), (7, 5, 40), (9, 64, 1)])
def test_the_score_is_the_mean_of_log_kernels(size, C, D):
    x, centroids = 3 * randn(size, D), randn(C, D, seed=1) * torch.rand(D, generator=generator(2)) + 5
    expected = torch.from_numpy(reference_score(x, centroids))
    found = PF.mean_log_kernel(x.double(), centroids.double())
    torch.testing.assert_close(found, expected.reshape(-1))
    torch.testing.assert_close(PF.mean_log_kernel(x, centroids), expected.reshape(-1).float(), rtol=1e-4, atol=1e-3)


def test_importance_is_minus_the_score_plus_gaussian_noise():
    features, draws = randn(12, 6), 600
    selector = learnt(DensityPublic(num_centroids=12), features)
    score = torch.from_numpy(reference_score(features, selector.estimator.centroids)).float()
    source = generator(5)
    noise = torch.stack(
        [selector.select(Candidates(12, source, features), 5).importance + score for _ in range(draws)]
    ) / (0.1 * score.abs().max())
    assert abs(noise.mean()) < 5 / math.sqrt(noise.numel())
    assert abs(noise.std() - 1) < 5 / math.sqrt(2 * noise.numel())
    assert abs(noise.pow(4).mean() - 3) < 5 * math.sqrt(96 / noise.numel())  # Gaussian
    correlation = torch.corrcoef(noise.T) - torch.eye(12)
    assert correlation.abs().max() < 5 / math.sqrt(draws)  # one for each sample
    found = selector.select(Candidates(12, source, features), 5)
    assert found.indices.tolist() == sorted(found.importance.topk(5).indices.tolist())


def test_it_prunes_the_centre_of_the_centroids():
    """Even where there is none of them: two clumps of centroids far apart, and a sample half-way between."""
    clumps = torch.cat([randn(8, 3) * 0.1 + 5, randn(8, 3, seed=1) * 0.1 - 5])
    x = torch.cat([clumps[::4], torch.zeros(1, 3)])
    public = learnt(DensityPublic(num_centroids=16), clumps)
    paper = learnt(Density(num_centroids=16, noise=0), clumps)
    assert PF.mean_log_kernel(x, public.estimator.centroids).argmax() == 4
    assert paper.estimator.log_density(x).argmin() == 4


def test_features_that_are_not_finite_prune_at_random_and_are_reported():
    features = randn(12, 6)
    selector = learnt(DensityPublic(num_centroids=12), features)
    spoiled = features.clone()
    spoiled[3, 1] = math.nan
    source, draws, times = generator(0), 600, torch.zeros(12)
    for _ in range(draws):
        found = selector.select(Candidates(12, source, spoiled), 6)
        assert found.importance.isfinite().all()
        times[found.indices] += 1
    assert all(within(f, 0.5, draws) for f in (times / draws).tolist())
    selector.learn(Candidates(12, source, spoiled), None)
    with pytest.raises(FloatingPointError, match="'cut'"):
        selector.check()


@pytest.mark.parametrize("value", [1e15, 1e25, 3e38])
def test_huge_features_have_a_finite_importance(value):
    selector = learnt(DensityPublic(num_centroids=8), 1e-8 * randn(8, 4))
    x = torch.full((3, 4), value)
    x[1:] = 0
    assert selector.select(Candidates(3, generator(), x), 1).importance.isfinite().all()


def test_its_state_travels_and_its_settings_are_those_of_density():
    features = randn(12, 6)
    first, second = learnt(DensityPublic(12), features), DensityPublic(12)
    second.load_state_dict(through_a_file(first.state_dict()))
    a, b = (s.select(Candidates(12, generator(), features), 5).importance for s in (first, second))
    assert torch.equal(a, b)
    assert first.config() == Density(12).config()
    assert first.name == "density_public"
