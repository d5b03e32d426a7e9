"""Density: what is common goes, what is rare stays; what it looks at, its noise, its state."""

import pytest
import torch
from torch import nn

from halfway import Density, ForwardBlocker, Schedule
from halfway import functional as PF
from halfway.selectors import Candidates
from tests.helpers.at_the_cut import Net, candidates
from tests.helpers.densities import learnt
from tests.helpers.draws import generator, randn

# ---------------------------------------------------------------------------------------------------- the choice


def test_until_the_centroids_are_complete_the_choice_is_random_and_exact():
    model = Net()
    selector = Density(num_centroids=40)
    blocker = ForwardBlocker(model, "cut", 0.5, selector=selector)
    x = torch.randn(8, 4)
    chosen = set()
    for i in range(9):
        model(blocker(x))
        assert len(blocker.last.indices) == 4
        assert blocker.last.importance.shape == (8,)
        assert selector.estimator.ready == (4 * (i + 1) >= 40)
        chosen.add(tuple(blocker.last.indices.tolist()))
    assert len(chosen) > 5


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("noise", [0, 0.01])
def test_duplicates_are_pruned_before_isolated_samples(noise, seed):
    """Half of each batch are near-copies of one sample, the others lie far out: the copies go. (In the first pruned
    step: from then on the estimator learns from what is retained, and forgets the copies.)"""
    torch.manual_seed(seed)
    model = Net(width=8)
    blocker = ForwardBlocker(
        model, "cut", 0.5, selector=Density(num_centroids=16, noise=noise), schedule=Schedule(4, unit="step")
    )
    common = torch.randn(8)
    for _ in range(5):
        x = common + 10 * nn.functional.normalize(torch.randn(32, 8))
        copies, isolated = torch.randperm(32).chunk(2)
        x[copies] = common + 0.05 * torch.randn(16, 8)
        model(blocker(x))
    assert torch.equal(blocker.last.indices, isolated.sort().values)
    assert blocker.last.importance[copies].max() < blocker.last.importance[isolated].min()


def test_only_the_retained_samples_are_learned():
    selector = Density(num_centroids=2)
    features = torch.arange(12.0).reshape(6, 2)
    selector.learn(candidates(features), torch.tensor([1, 4]))
    torch.testing.assert_close(selector.estimator.centroids, features[[1, 4]])
    assert selector.estimator.counts.tolist() == [1, 1]


def test_noise_zero_is_deterministic_and_large_noise_reorders():
    torch.manual_seed(0)
    features = torch.randn(64, 4)

    def choose(noise, seed):
        selector = Density(num_centroids=8, noise=noise)
        selector.learn(candidates(features), None)
        return selector.select(candidates(features, seed=seed), 32)

    assert torch.equal(choose(0, 1).indices, choose(0, 2).indices)
    assert not torch.equal(choose(1e6, 1).indices, choose(1e6, 2).indices)
    for selection in (choose(0, 1), choose(0.5, 1)):
        lowest_retained = selection.importance[selection.indices].min()
        assert (selection.importance > lowest_retained).sum() == 31
        assert selection.importance.shape == (64,)


def test_the_paper_s_density_draws_the_same_numbers_as_before():
    features = randn(12, 6)
    selector = learnt(Density(num_centroids=12), features)
    found = selector.select(Candidates(12, generator(3), features), 5)
    source = generator(3)
    torch.rand(12, generator=source)  # for a step that is not finite
    expected = PF.importance(selector.estimator.log_density(features), 0.01, source)
    assert torch.equal(found.importance, expected)


def test_half_precision_features_are_scored_in_full_precision():
    torch.manual_seed(0)
    features = torch.randn(32, 4)
    choices = []
    for dtype in (torch.float32, torch.bfloat16):
        selector = Density(num_centroids=8, noise=0)
        f = features.bfloat16().to(dtype)
        selector.learn(candidates(f), None)
        assert selector.estimator.centroids.dtype == torch.float32
        choices.append(selector.select(candidates(f), 16).indices)
    assert torch.equal(*choices)


def test_the_state_of_the_selector_travels():
    first, second = Density(num_centroids=4), Density(num_centroids=4)
    features = torch.randn(10, 6)
    first.learn(candidates(features), None)
    second.load_state_dict(first.state_dict())
    a, b = (s.select(candidates(features), 5) for s in (first, second))
    assert torch.equal(a.indices, b.indices)
    assert torch.equal(a.importance, b.importance)
    second.load_state_dict(Density(num_centroids=4).state_dict())
    assert second.estimator is None


# -------------------------------------------------------------------------------------------------- the features


def test_the_representation_is_pooled_over_space_and_never_wider_than_asked():
    features = torch.randn(6, 10, 4, 4)
    for dim, expected in ((128, features.mean((2, 3))), (5, features.mean((2, 3)).unflatten(1, (5, 2)).mean(2))):
        selector = Density(num_centroids=6, dim=dim)
        selector.bind("conv", nn.Conv2d(3, 10, 3))
        selector.learn(candidates(features), None)
        torch.testing.assert_close(selector.estimator.centroids, expected)


def test_an_explicit_channel_axis_wins():
    features = torch.randn(4, 10, 3, 7)
    selector = Density(num_centroids=4, channel_dim=3)
    selector.bind("conv", nn.Conv2d(3, 10, 3))
    selector.learn(candidates(features), None)
    torch.testing.assert_close(selector.estimator.centroids, features.mean((1, 2)))


def test_features_of_another_width_name_the_layer_and_the_fix():
    selector = Density(num_centroids=4)
    selector.bind("blocks.3", nn.Identity())
    selector.learn(candidates(torch.randn(6, 10)), None)
    for use in (
        lambda c: selector.select(c, 3),
        lambda c: selector.learn(c, None),
    ):
        with pytest.raises(ValueError, match=r"'blocks.3' now have 9 channels.*made for 10.*channel_dim"):
            use(candidates(torch.randn(6, 9)))
