"""The estimator: what it remembers, when it is ready, and that it follows the equations step by step."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

from halfway.state.estimator import DensityEstimator
from tests.helpers import reference


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(num_centroids=4, dim=3, seed=0, **options):
    """A ready estimator that has learned from a few batches."""
    estimator = DensityEstimator(num_centroids, dim, **options)
    for step in range(3):
        estimator.update(randn(num_centroids, dim, seed=seed + step))
    return estimator


def state_of(estimator):
    return estimator.ready, estimator.centroids.clone(), estimator.counts.clone()


def assert_same_state(actual, expected):
    assert actual[0] == expected[0]
    assert torch.equal(actual[1], expected[1])
    assert torch.equal(actual[2], expected[2])


# --- filling --------------------------------------------------------------------------------------


def test_the_first_samples_become_the_centroids_over_several_small_batches():
    estimator = DensityEstimator(num_centroids=8, dim=3)
    x = randn(8, 3)
    for part, counts in ((x[:3], [1] * 3 + [0] * 5), (x[3:6], [1] * 6 + [0] * 2), (x[6:], [1] * 8)):
        assert not estimator.ready
        estimator.update(part)
        assert estimator.counts.tolist() == counts
    assert estimator.ready
    assert torch.equal(estimator.centroids, x)


def test_a_batch_larger_than_the_missing_centroids_fills_them_and_teaches_the_rest():
    x = randn(20, 3)
    estimator = DensityEstimator(num_centroids=8, dim=3)
    estimator.update(x[:5])
    estimator.update(x[5:])
    stepwise = DensityEstimator(num_centroids=8, dim=3)
    stepwise.update(x[:8])
    stepwise.update(x[8:])
    assert_same_state(state_of(estimator), state_of(stepwise))
    assert estimator.counts.sum() == 20
    assert not torch.equal(estimator.centroids, x[:8])


def test_an_empty_batch_changes_nothing():
    estimator = DensityEstimator(4, 3)
    estimator.update(torch.empty(0, 3))
    assert not estimator.ready
    estimator = filled()
    before = state_of(estimator)
    estimator.update(torch.empty(0, 3))
    assert_same_state(state_of(estimator), before)


def test_there_is_no_density_before_all_centroids_are_filled():
    estimator = DensityEstimator(num_centroids=8, dim=3)
    estimator.update(randn(5, 3))
    with pytest.raises(RuntimeError, match=r"only 5 of 8 centroids are filled; call update\(\)"):
        estimator.log_density(randn(2, 3))


@pytest.mark.parametrize("shape", [(3,), (5, 4), (5, 2), (5, 3, 1), (3, 5)])
def test_a_wrong_shape_is_refused_by_name(shape):
    estimator = filled(dim=3)
    before = state_of(estimator)
    with pytest.raises(ValueError, match=r"expected representations of shape \(samples, 3\), got \("):
        estimator.log_density(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"expected representations of shape \(samples, 3\), got \("):
        estimator.update(torch.zeros(shape))
    assert_same_state(state_of(estimator), before)


# --- learning -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel_weights", [True, False])
@pytest.mark.parametrize("bandwidth", ["silverman", "scott", "identity"])
@pytest.mark.parametrize(("update_rule", "beta"), [("convex", 0.01), ("convex", 0.9), ("as_printed", 0.9)])
def test_the_estimator_follows_the_reference_step_by_step(update_rule, beta, bandwidth, kernel_weights, dtype):
    estimator = DensityEstimator(6, 4, bandwidth, update_rule, kernel_weights, beta).to(dtype)
    centroids, counts = randn(6, 4), np.ones(6, dtype=np.int64)
    estimator.update(centroids)
    centroids = centroids.double().numpy()
    for step in range(1, 9):
        x = randn(10, 4, seed=step)
        sums, arrivals = reference.cluster_sums(x, centroids)
        centroids, counts = reference.update_centroids(centroids, counts, sums, arrivals, beta, update_rule)
        estimator.update(x)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    assert estimator.counts.tolist() == counts.tolist()
    torch.testing.assert_close(estimator.centroids, torch.tensor(centroids, dtype=dtype), **tolerance)
    x = randn(5, 4, seed=100)
    expected = reference.log_density(x, centroids, counts if kernel_weights else None, bandwidth)
    torch.testing.assert_close(estimator.log_density(x), torch.tensor(expected, dtype=dtype), **tolerance)


def test_the_defaults_are_those_of_the_paper():
    estimator = DensityEstimator()
    assert estimator.centroids.shape == (64, 128)
    assert (estimator.beta, estimator.bandwidth, estimator.update_rule) == (0.01, "silverman", "convex")
    assert estimator.kernel_weights


def clustered(steps, batch=64):
    """Batches from ten tight clusters of non-negative features, like those behind a ReLU."""
    generator = torch.Generator().manual_seed(0)
    centers = 3 * torch.randn(10, 16, generator=generator).relu()
    for _ in range(steps):
        labels = torch.randint(10, (batch,), generator=generator)
        yield (centers[labels] + 0.1 * torch.randn(batch, 16, generator=generator)).relu()


@pytest.fixture
def one_thread():
    """For hundreds of tiny steps: on a busy machine several threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def largest_cluster_and_norm_ratio(update_rule):
    """After 300 batches: the share of samples in the fullest cluster, and |centroid| relative to |sample|."""
    estimator = DensityEstimator(8, 16, update_rule=update_rule)
    for x in clustered(300):
        estimator.update(x)
    share = torch.bincount(torch.as_tensor(reference.assign(x, estimator.centroids))).max().item() / len(x)
    return share, (estimator.centroids.norm(dim=1).mean() / x.norm(dim=1).mean()).item()


@pytest.mark.usefixtures("one_thread")
def test_the_printed_update_collapses_on_clustered_data():
    share, norm_ratio = largest_cluster_and_norm_ratio("as_printed")
    assert norm_ratio < 0.01
    assert share > 0.9


@pytest.mark.usefixtures("one_thread")
def test_the_convex_update_keeps_the_clusters():
    share, norm_ratio = largest_cluster_and_norm_ratio("convex")
    assert 0.8 < norm_ratio < 1.2
    assert share < 0.6


@pytest.mark.usefixtures("one_thread")
def test_convex_centroids_find_the_cluster_means():
    estimator = DensityEstimator(2, 1)
    estimator.update(torch.tensor([[-4.0], [7.0]]))
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        noise = torch.randn(20, 1, generator=generator)
        estimator.update(noise + torch.tensor([-10.0, 10.0]).repeat(10).unsqueeze(1))
    torch.testing.assert_close(estimator.centroids, torch.tensor([[-10.0], [10.0]]), atol=0.5, rtol=0)


def test_what_was_seen_often_becomes_dense():
    estimator = DensityEstimator(2, 1, bandwidth="identity")
    estimator.update(torch.tensor([[-5.0], [5.0]]))
    estimator.update(torch.tensor([[5.0]] * 8))
    rare, common = estimator.log_density(torch.tensor([[-5.0], [5.0]])).exp()
    assert (common / rare).item() == pytest.approx(9, rel=1e-4)


def test_counting_goes_on_by_one_beyond_what_float32_can_count():
    estimator = filled(2, 3)
    estimator.counts.fill_(10**9)
    x = randn(1, 3)
    estimator.update(x)
    assert estimator.counts.dtype == torch.int64
    assert sorted(estimator.counts.tolist()) == [10**9, 10**9 + 1]
    assert estimator.log_density(x).isfinite().all()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("update_rule", ["convex", "as_printed"])
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_identical_samples_keep_everything_finite(value, update_rule):
    estimator = DensityEstimator(8, 512, update_rule=update_rule)
    for _ in range(50):
        estimator.update(torch.full((16, 512), value))
    assert estimator.centroids.isfinite().all()
    assert estimator.log_density(torch.stack([torch.full((512,), value), torch.ones(512)])).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_samples_of_any_float_type_are_learned_in_float32(dtype):
    estimator, expected = DensityEstimator(4, 3), DensityEstimator(4, 3)
    x = randn(12, 3).to(dtype)
    estimator.update(x)
    expected.update(x.float())
    assert_same_state(state_of(estimator), state_of(expected))
    assert estimator.log_density(x).dtype == torch.float32


def test_neither_gradients_nor_the_global_rng_are_involved():
    before = torch.get_rng_state()
    estimator = DensityEstimator(4, 3)
    x = randn(12, 3).requires_grad_()
    estimator.update(x)
    assert not estimator.log_density(x).requires_grad
    assert not estimator.centroids.requires_grad
    assert torch.equal(torch.get_rng_state(), before)


# --- not finite -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("update_rule", ["convex", "as_printed"])
@pytest.mark.parametrize("seen", [0, 5, 8, 30], ids=["empty", "filling", "just filled", "learned"])
def test_a_batch_with_a_value_that_is_not_finite_leaves_the_state_unchanged(seen, update_rule, bad):
    estimator = DensityEstimator(8, 3, update_rule=update_rule)
    estimator.update(randn(seen, 3))
    before = state_of(estimator)
    x = randn(10, 3, seed=1)
    x[9, 1] = bad
    estimator.update(x)
    assert_same_state(state_of(estimator), before)
    estimator.update(randn(10, 3, seed=2))
    assert estimator.counts.sum() == seen + 10  # and learning goes on


# --- state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seen", [0, 5, 8, 30])
def test_a_state_dict_restores_the_estimator_and_whether_it_is_ready(seen):
    estimator = DensityEstimator(8, 3)
    estimator.update(randn(seen, 3))
    file = io.BytesIO()
    torch.save(estimator.state_dict(), file)
    file.seek(0)
    restored = DensityEstimator(8, 3)
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert restored.ready == (seen >= 8)
    assert_same_state(state_of(restored), state_of(estimator))
    for each in (estimator, restored):  # Both go on alike, also in the middle of the filling.
        each.update(randn(10, 3, seed=1))
    assert_same_state(state_of(restored), state_of(estimator))
    assert torch.equal(restored.log_density(randn(4, 3)), estimator.log_density(randn(4, 3)))


def test_loading_an_unfilled_state_into_a_ready_estimator_makes_it_unready():
    estimator = filled(4, 3)
    estimator.load_state_dict(DensityEstimator(4, 3).state_dict())
    assert not estimator.ready


def test_the_state_is_restored_inside_a_larger_module_too():
    source, target = (
        nn.ModuleDict({"density": filled(4, 3)}),
        nn.ModuleDict({"density": DensityEstimator(4, 3)}),
    )
    target.load_state_dict(source.state_dict())
    assert target["density"].ready


def test_a_state_of_another_size_is_refused():
    with pytest.raises(RuntimeError, match="size mismatch for centroids"):
        DensityEstimator(8, 3).load_state_dict(filled(4, 3).state_dict())


def test_a_copy_learns_on_its_own():
    estimator = filled(4, 3)
    before = state_of(estimator)
    twin = copy.deepcopy(estimator)
    assert twin.ready
    twin.update(randn(10, 3, seed=9))
    assert_same_state(state_of(estimator), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_centroids": 0}, "must be at least 1, got num_centroids=0, dim=128"),
        ({"num_centroids": -1}, "must be at least 1, got num_centroids=-1"),
        ({"dim": 0}, "must be at least 1, got num_centroids=64, dim=0"),
        (
            {"bandwidth": "silvermann"},
            "unknown bandwidth 'silvermann'; choose one of .*'silverman', 'scott', 'identity'",
        ),
        ({"update_rule": "printed"}, "unknown update_rule 'printed'; choose one of .*'convex', 'as_printed'"),
        ({"beta": -0.1}, r"beta is the weight of the past and must be in \[0, 1\), got -0.1"),
        ({"beta": 1.0}, r"must be in \[0, 1\), got 1.0"),
        ({"beta": float("nan")}, r"must be in \[0, 1\), got nan"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DensityEstimator(**arguments)
