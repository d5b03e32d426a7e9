"""The early exit: what it retains, what it learns from, and how it says that it cannot."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfway.selectors import Candidates, EarlyExit
from halfway.selectors.balanced_remembered import projection
from halfway.selectors.early_exit import divergences
from halfway.selectors.tools.draw import inclusion_probabilities
from tests.helpers.draws import generator, randn, within
from tests.helpers.remembered import through_a_file
from tests.helpers.waiting import NoWaiting

C, D = 4, 6


def candidates(features, targets, seed=0, **others):
    source = seed if isinstance(seed, torch.Generator) else generator(seed)
    return Candidates(len(features), source, features, targets=targets, **others)


def toy(step, size=32, wrong=()):
    """Four clusters, and labels that are wrong in some rows."""
    classes = torch.randint(C, (size,), generator=generator(step))
    x = 3 * F.one_hot(classes, D).float() + 0.3 * randn(size, D, seed=step)
    classes[list(wrong)] = (classes[list(wrong)] + 1) % C
    return x, classes


def trained(steps=60, **settings):
    selector = EarlyExit(num_classes=C, **settings)
    for step in range(steps):
        selector.learn(candidates(*toy(step)), None)
    return selector


def tensors(selector):
    return {name: torch.as_tensor(value).clone() for name, value in selector.state_dict().items()}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    assert all(torch.equal(torch.as_tensor(actual[name]), torch.as_tensor(expected[name])) for name in expected)


# ------------------------------------------------------------------------------------------------- the choice


def test_the_score_is_the_divergence_of_the_prediction_from_the_target():
    log_p = randn(5, C).log_softmax(1)
    classes = torch.tensor([0, 3, 1, 2, 2])
    hard = divergences(F.one_hot(classes, C).float(), log_p)
    torch.testing.assert_close(hard, F.cross_entropy(log_p, classes, reduction="none"))
    soft = (2 * randn(5, C, seed=1)).softmax(1)
    torch.testing.assert_close(divergences(soft, log_p), F.kl_div(log_p, soft, reduction="none").sum(1))
    torch.testing.assert_close(divergences(log_p.exp(), log_p), torch.zeros(5))  # its own entropy is not preferred
    assert (divergences(torch.zeros(5, C), log_p) == 0).all()


@pytest.mark.parametrize("settings", [{}, {"pick": "hard"}])
def test_an_untrained_head_draws_uniformly(settings):
    selector, source, draws = EarlyExit(num_classes=C, **settings), generator(0), 2000
    batch = candidates(*toy(0, 12), seed=source)
    counts, pairs = torch.zeros(12), torch.zeros(12, 12)
    for _ in range(draws):
        found = selector.select(batch, 4)
        assert (found.importance == found.importance[0]).all()
        chosen = torch.zeros(12).index_fill(0, found.indices, 1.0)
        counts += chosen
        pairs += chosen.outer(chosen)
    assert all(within(frequency, 4 / 12, draws) for frequency in (counts / draws).tolist())
    apart = (pairs / draws)[~torch.eye(12, dtype=torch.bool)]
    assert all(within(frequency, 4 * 3 / (12 * 11), draws) for frequency in apart.tolist())


def test_a_head_that_finds_nothing_to_learn_draws_almost_uniformly():
    selector, spread = EarlyExit(num_classes=10), []
    for step in range(40):
        y = torch.randint(10, (128,), generator=generator(step))
        batch = candidates(randn(128, 64, 2, 2, seed=step), y)
        w = 1 - (-selector.select(batch, 64).importance.double()).exp()
        spread.append(inclusion_probabilities(w, 64).std().item())
        selector.learn(batch, None)
    assert spread[0] < 1e-6
    assert max(spread) < 0.15  # 0.5 for a choice that is certain, as the hard one is


def test_a_head_that_learns_noise_in_small_batches_draws_at_random():
    """Labels that nothing explains, and batches so small that the head overshoots: worse than chance is not hard."""
    selector, source = EarlyExit(num_classes=10), generator(0)
    for _ in range(60):
        x = torch.randn(16, 256, generator=source)
        batch = candidates(x, torch.randint(10, (16,), generator=source), seed=source)
        selector.learn(batch, None)
    assert selector._head.skill < 0.02
    scores = selector.select(batch, 8).importance
    assert scores.std() > 1, "the head itself has strong opinions"
    counts, draws = torch.zeros(16), 2000
    for _ in range(draws):
        counts[selector.select(batch, 8).indices] += 1
    assert all(within(f, 0.5, draws) for f in (counts / draws).tolist())


def test_samples_are_drawn_in_proportion_to_the_probability_of_another_class():
    selector, source, draws, S = trained(12), generator(0), 3000, 5
    x, y = toy(99, 12, wrong=[2, 7])
    batch = candidates(x, y, seed=source)
    wrong = 1 - selector._head.log_probabilities(F.pad(x, (0, 250))).exp()[torch.arange(12), y].double()
    skill = float(selector._head.skill)
    assert 0.2 < skill < 1
    expected = inclusion_probabilities(skill * wrong + (1 - skill) * wrong.mean(), S)
    assert expected.max() > 2 * expected.min()
    counts = torch.zeros(12)
    for _ in range(draws):
        counts[selector.select(batch, S).indices] += 1
    assert all(within(f, p, draws) for f, p in zip((counts / draws).tolist(), expected.tolist(), strict=True))


def test_the_hard_choice_retains_wrong_labels_once_the_head_has_learned():
    x, y = toy(99, wrong=[3, 11, 20, 28])
    found = trained(pick="hard").select(candidates(x, y), 4)
    assert found.indices.tolist() == [3, 11, 20, 28]
    proportional = trained().select(candidates(x, y), 8)
    assert {3, 11, 20, 28} <= set(proportional.indices.tolist())
    assert proportional.importance.shape == (32,)


def test_a_sample_without_a_label_is_average_in_the_draw_and_last_in_the_hard_choice():
    selector, hard, source = trained(6), trained(6, pick="hard"), generator(0)
    x, y = toy(99, 12, wrong=[2, 7])
    y[5] = -100
    assert 5 not in hard.select(candidates(x, y), 11).indices
    scores = selector.select(candidates(x, y), 5).importance.double()
    w = 1 - (-scores).exp()
    w[5] = w[torch.arange(12) != 5].mean()
    draws = 2000
    drawn = sum(5 in selector.select(candidates(x, y, source), 5).indices for _ in range(draws))
    assert within(drawn / draws, inclusion_probabilities(w, 5)[5].item(), draws)


def test_the_choice_is_made_before_the_head_learns_from_the_batch():
    selector, twin = trained(3), trained(3)
    x, y = toy(50)
    first = selector.select(candidates(x, y), 8)
    selector.learn(candidates(x, y), first.indices)
    assert torch.equal(first.importance, twin.select(candidates(x, y), 8).importance)
    assert not torch.equal(selector.select(candidates(x, y), 8).importance, first.importance)


# ------------------------------------------------------------------------------------------------- what is learned


def test_it_learns_from_all_samples_whatever_is_retained():
    all_stay, few_stay = trained(2), trained(2)
    all_stay.learn(candidates(*toy(9)), None)
    few_stay.learn(candidates(*toy(9)), torch.tensor([0, 4]))
    assert_same(tensors(all_stay), tensors(few_stay))


def test_masks_teach_the_shares_of_their_labelled_pixels():
    masks = torch.tensor([[[0, 0], [1, 255]], [[2, -100], [255, 255]], [[255, 255], [255, 255]]])
    shares = torch.tensor([[2 / 3, 1 / 3, 0, 0], [0, 0, 1.0, 0]])
    by_mask, by_share, x = EarlyExit(num_classes=C), EarlyExit(num_classes=C), randn(3, D)
    for _ in range(3):
        by_mask.learn(candidates(x, masks), None)
        by_share.learn(candidates(x[:2], shares), None)
    for name, value in tensors(by_share).items():
        torch.testing.assert_close(tensors(by_mask)[name], value)


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (randn(3, 8, 6, 6), lambda f: F.adaptive_avg_pool2d(f, 2).flatten(1)),
        (randn(3, 9, 8), lambda f: f.mean(1)),  # tokens
        (randn(3, 8, 6, 6).bfloat16(), lambda f: F.adaptive_avg_pool2d(f.float(), 2).flatten(1)),
        (randn(3, 8), lambda f: f),
        (randn(3, 100, 4, 4), lambda f: F.adaptive_avg_pool2d(f, 2).flatten(1) @ projection(400, 256)),
    ],
)
def test_features_are_pooled_to_at_most_256_numbers(features, expected):
    found, x = EarlyExit(num_classes=C)._represent(features), expected(features)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, F.pad(x, (0, 256 - x.shape[1])))


@pytest.mark.parametrize("settings", [{}, {"pick": "hard"}])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_batch_that_is_not_finite_is_drawn_at_random_teaches_nothing_and_is_reported(value, settings):
    selector, source, draws = trained(**settings), generator(0), 500
    selector.bind("layer1", nn.Identity())
    before, (x, y) = tensors(selector), toy(99, 12, wrong=[2, 7])
    x[4, 1] = value
    batch, counts = candidates(x, y, source), torch.zeros(12)
    for _ in range(draws):
        counts[selector.select(batch, 3).indices] += 1
    assert all(within(frequency, 0.25, draws) for frequency in (counts / draws).tolist())
    selector.learn(batch, None)
    assert_same(tensors(selector), before)
    with pytest.raises(FloatingPointError, match="'layer1'"):
        selector.check()
    selector.check()


@pytest.mark.parametrize("settings", [{}, {"pick": "hard"}])
@pytest.mark.parametrize("targets", ["classes", "probabilities", "masks"])
def test_nothing_waits_for_the_device_after_the_first_batch(targets, settings):
    selector, (x, y) = EarlyExit(num_classes=C, **settings), toy(0)
    y = {"classes": y, "probabilities": F.one_hot(y, C).float(), "masks": y[:, None, None].expand(-1, 3, 3)}[targets]
    selector.learn(candidates(x, y), None)
    batch = candidates(x, y)
    with NoWaiting():
        selector.learn(batch, selector.select(batch, 8).indices)


# ------------------------------------------------------------------------------------------------- state and settings


def test_a_state_goes_on_bit_for_bit_and_keeps_its_shapes():
    selector, again = trained(5), EarlyExit(num_classes=C)
    shapes = {name: torch.as_tensor(value).shape for name, value in again.state_dict().items()}
    assert {name: torch.as_tensor(value).shape for name, value in selector.state_dict().items()} == shapes
    again.load_state_dict(through_a_file(selector.state_dict()))
    for step in range(5, 8):
        for each in (selector, again):
            batch = candidates(*toy(step))
            each.learn(batch, each.select(batch, 8).indices)
    assert_same(tensors(again), tensors(selector))


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    selector = trained(3)
    good = tensors(selector)
    for change in ({"width": -1}, {"more": 0}, {"weights": torch.zeros(C + 1, 257)}):
        with pytest.raises(ValueError, match="state"):
            selector.load_state_dict({**EarlyExit(num_classes=C).state_dict(), **change})
    assert_same(tensors(selector), good)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pick": "soft"}, r"unknown pick 'soft'; choose one of \('proportional', 'hard'\)"),
        ({"num_classes": 1}, "num_classes must be at least 2, got 1"),
        ({"grid": 0}, "must be at least 1, got grid=0"),
        ({"dim": 0}, "must be at least 1, got grid=2, dim=0"),
        ({"lr": 0.0}, "must be positive, got 0"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EarlyExit(**settings)


# ------------------------------------------------------------------------------------------------- what cannot work


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (torch.zeros(8), r"float32 of shape \(8,\)"),
        (torch.zeros(8, 5), r"float32 of shape \(8, 5\)"),
        (torch.zeros(8, 16, dtype=torch.int64), r"int64 of shape \(8, 16\)"),
        ([{"boxes": 0}] * 8, "a list"),
    ],
)
def test_targets_that_are_not_classes_are_an_error_that_names_alternatives(targets, found):
    selector = EarlyExit(num_classes=C)
    with pytest.raises(ValueError, match=f"got {found}.*target=.*random, last_loss_proportional or density"):
        selector.select(candidates(randn(8, D), targets), 4)


@pytest.mark.parametrize("targets", [torch.full((8,), C), torch.ones(8, C)])
def test_wrong_values_are_an_error_in_the_first_batch_and_reported_later(targets):
    first, later = EarlyExit(num_classes=C), trained(1)
    with pytest.raises(ValueError, match=r"neither classes from 0 to 3 nor probabilities.*num_classes"):
        first.learn(candidates(randn(8, D), targets), None)
    before = tensors(later)
    later.learn(candidates(randn(8, D), targets), None)
    assert_same(tensors(later), before)
    with pytest.raises(ValueError, match="neither classes from 0 to 3 nor probabilities"):
        later.check()
    later.check()


def test_the_classes_are_those_of_the_last_linear_layer():
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(20, 7))
    selector = EarlyExit()
    assert selector.watches(model) is None
    assert selector.state_dict()["weights"].shape == (7, 257)
    selector = EarlyExit(num_classes=3)
    selector.watches(model)
    assert selector.state_dict()["weights"].shape == (3, 257)
    with pytest.raises(ValueError, match=r"does not end in a linear layer.*num_classes=.*random, last_loss"):
        EarlyExit().watches(model[:1])
    with pytest.raises(ValueError, match=r"with a single output.*num_classes="):
        EarlyExit().watches(nn.Linear(4, 1))
    with pytest.raises(ValueError, match="pass num_classes"):
        EarlyExit().select(candidates(*toy(0)), 8)


def test_features_of_another_width_are_an_error_that_names_the_layer():
    selector = trained(1)
    selector.bind("body", nn.Identity())
    with pytest.raises(ValueError, match=r"'body' now have 5 values after pooling, and 6.*channel_dim"):
        selector.learn(candidates(randn(8, 5), torch.zeros(8, dtype=torch.int64)), None)
