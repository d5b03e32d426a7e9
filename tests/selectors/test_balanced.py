"""Balanced sampling by the features at the cut, and what both kinds of it share: losses, settings, state, training."""

from __future__ import annotations

import io
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfway import ForwardBlocker, Schedule
from halfway.selectors import Balanced, BalancedRemembered
from halfway.selectors.balanced import grid_means
from halfway.selectors.balanced_remembered import projection
from halfway.selectors.tools.class_shares import largest_class
from halfway.selectors.tools.pivotal import distances, pivotal, standardised
from halfway.state import sample_memory as memories
from tests.helpers.balanced import SOURCES, Net, assert_equally_likely, candidates, clustered, drawn
from tests.helpers.draws import generator, randn
from tests.helpers.waiting import NoWaiting

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------- features at the cut


def test_features_are_pooled_to_a_grid():
    image = torch.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6).float()
    by_hand = torch.stack([image[:, :, i : i + 2, j : j + 3].mean((2, 3)) for i in (0, 2) for j in (0, 3)], 2)
    for features, axis in ((image, 1), (image.permute(0, 2, 3, 1), -1), (image.permute(0, 2, 3, 1), 3)):
        torch.testing.assert_close(grid_means(features, axis, 2), by_hand.flatten(1))
        torch.testing.assert_close(grid_means(features, axis, 1), image.mean((2, 3)))
    assert grid_means(image[:, :, :1], 1, 2).shape == (2, 3 * 1 * 2)  # never more cells than there are
    tokens = randn(2, 7, 5)
    torch.testing.assert_close(grid_means(tokens, -1, 2), tokens.mean(1))
    torch.testing.assert_close(grid_means(tokens, 1, 2), tokens.mean(2))
    volume = randn(2, 3, 2, 2, 2)
    torch.testing.assert_close(grid_means(volume, 1, 2), volume.flatten(1))
    vectors = randn(2, 7).bfloat16()
    assert torch.equal(grid_means(vectors, 1, 2), vectors.float())
    with pytest.raises(ValueError, match="channel axis"):
        grid_means(torch.zeros(3), 1, 2)


def test_classes_come_from_labels_or_probabilities():
    labels = torch.tensor([2, 0, 1, 2])
    soft = F.one_hot(labels, 3) * 0.7 + 0.1
    for targets in (labels, labels.to(torch.uint8), soft, soft.double(), soft.bfloat16()):
        found = largest_class(targets, 4, CPU)
        assert (found.classes_B.tolist(), bool(found.wrong)) == ([2, 0, 1, 2], False)
    assert largest_class(torch.tensor([True, False, True, True]), 4, CPU).classes_B.tolist() == [1, 0, 1, 1]
    for others in (
        None,
        "labels",
        labels.float(),
        labels[:3],
        torch.zeros(4, 8, 8).long(),
        torch.zeros(4, 1),
        (labels,),
    ):
        assert largest_class(others, 4, CPU) is None
    summing_to_one = randn(4, 3) - randn(4, 3).mean(1, keepdim=True) + 1 / 3
    for numbers in (randn(4, 3), 3 * soft, soft - 0.2, summing_to_one):  # regression, several labels
        found = largest_class(numbers, 4, CPU)
        assert bool(found.wrong)
        assert len(found.classes_B.unique()) == 1


def test_features_at_the_cut_compete_within_their_class():
    """Every image is there twice, once in each of two classes, next to another class's copy of it."""
    size = 24
    x = randn(size, 6, 4, 4)
    classes = torch.arange(size) % 2
    x[1::2] = x[0::2]  # twins, but of the other class
    selector = Balanced()
    selector.bind("conv", nn.Conv2d(3, 6, 3))
    assert (selector.needs, selector.wants_ids, selector.wants_targets) == ("features", "optional", "optional")
    source, split = generator(0), []
    for targets in (None, classes):
        both = 0
        for _ in range(20):
            found = selector.select(candidates(x, source, targets=targets), size // 2)
            assert found.importance is None
            assert found.weights is None
            chosen = torch.zeros(size).index_fill(0, found.indices, 1)
            both += (chosen[0::2] == chosen[1::2]).sum().item()
            if targets is not None:
                assert classes[found.indices].bincount().tolist() == [size // 4, size // 4]
        split.append(both)
    assert split[0] == 0  # without classes exactly one of the twins stays
    assert split[1] > 50  # with classes they do not meet


def test_the_shares_of_classes_are_kept_to_a_sample():
    sizes = torch.tensor([3, 7, 12, 18])
    classes = torch.arange(4).repeat_interleave(sizes)
    selector, source = Balanced(), generator(1)
    spread = torch.zeros(4)
    for _ in range(30):
        rows = selector.select(candidates(randn(40, 5), source, targets=classes), 24).indices
        found = classes[rows].bincount(minlength=4)
        assert ((found - 0.6 * sizes).abs() <= 1).all()
        spread += found - 0.6 * sizes
    assert (spread / 30).abs().max() < 0.4


def test_shuffling_the_batch_does_not_change_anybodys_chance():
    size, count = 12, 5
    x, classes = clustered(size), torch.arange(size) % 3
    selector, source = Balanced(), generator(3)

    def draw():
        order = torch.randperm(size, generator=source)
        rows = selector.select(candidates(x[order], source, targets=classes[order]), count).indices
        return order[rows]

    shuffled = drawn(draw, size, 600)
    assert_equally_likely(shuffled, count / size)
    d = distances(standardised(x, torch.ones(size, dtype=torch.bool)), classes)
    direct = drawn(lambda: pivotal(d, count, source), size, 600)
    # Also who stays together.
    difference = (shuffled.T @ shuffled - direct.T @ direct) / 600
    assert difference.abs().max() < 5 * math.sqrt(2 * 0.25 / 600)


def test_the_scale_of_a_channel_does_not_matter_and_constant_channels_neither():
    x, scale = randn(20, 6), torch.tensor([1e-3, 1.0, 1e4, 1.0, 5.0, 1.0])
    for other in (x * scale + 3, torch.cat([x, torch.full((20, 4), 7.0)], 1)):
        a, b = (Balanced().select(candidates(f, 4), 9).indices for f in (x, other))
        assert torch.equal(a, b)


def test_the_layer_tells_where_the_channels_are():
    x = randn(16, 5, 5, 3)
    choices = []
    for features, layer, settings in (
        (x, nn.LayerNorm(3), {}),
        (x.permute(0, 3, 1, 2), nn.Conv2d(1, 3, 1), {}),
        (x, nn.Conv2d(1, 9, 1), {"channel_dim": -1}),
    ):
        selector = Balanced(**settings)
        selector.bind("layer", layer)
        choices.append(selector.select(candidates(features), 7).indices)
    assert all(torch.equal(a, b) for a, b in pairwise(choices))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_features_that_are_not_finite_prune_at_random_and_are_reported(bad):
    size, source, selector = 12, generator(0), Balanced()
    selector.bind("layer3", nn.Identity())
    twins = randn(size // 2, 4).repeat(2, 1)
    selector.select(candidates(twins, source), 6)
    selector.check()
    spoiled = twins.clone()
    spoiled[3, 1] = bad
    chosen = drawn(lambda: selector.select(candidates(spoiled, source), 6).indices, size, 400)
    assert_equally_likely(chosen, 0.5)
    assert (chosen[:, :6] == chosen[:, 6:]).double().mean() > 0.2  # twins are not seen
    with pytest.raises(FloatingPointError, match="'layer3'"):
        selector.check()
    selector.check()  # said once


# -------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("features", ["cut", "remembered"])
def test_the_last_known_loss_is_one_more_coordinate(features):
    size, ids = 16, torch.arange(16) + 4
    selector, source = SOURCES[features](num_samples=20), generator(0)
    x = torch.zeros(size, 3) if features == "cut" else None
    assert selector.wants_losses == "optional"
    pair = (torch.arange(size) % (size // 2)).float()

    def twins_split():
        chosen = drawn(lambda: selector.select(candidates(x, source, size, ids=ids), 8).indices, size, 30)
        return bool((chosen[:, :8] + chosen[:, 8:] == 1).all())

    assert not twins_split()
    retained = torch.arange(0, size, 2)
    selector.observe(candidates(x, size=size, ids=ids), retained, pair[retained])
    assert not twins_split()  # the others' are unknown
    selector.observe(candidates(x, size=size, ids=ids), None, pair)
    assert twins_split()
    other = SOURCES[features](num_samples=20)
    other.load_state_dict(selector.state_dict())
    selector = other
    assert twins_split()
    selector = SOURCES[features](num_samples=20, use_loss=False)
    assert selector.wants_losses == "no"
    selector.observe(candidates(x, size=size, ids=ids), None, pair)
    assert not twins_split()


def test_without_ids_or_losses_features_are_enough():
    selector, x = Balanced(), randn(10, 3)
    selector.observe(candidates(x), None, torch.ones(10))
    a = selector.select(candidates(x), 4).indices
    assert torch.equal(a, Balanced(use_loss=False).select(candidates(x), 4).indices)
    assert torch.equal(a, Balanced().select(candidates(x, ids=torch.arange(10)), 4).indices)


def test_losses_that_are_not_finite_are_unknown_and_reported():
    selector, ids = Balanced(), torch.arange(4)
    selector.observe(candidates(size=4, ids=ids), None, torch.tensor([1.0, math.nan, 2.0, math.inf]))
    assert selector.state_dict()["losses"].squeeze(1).isnan().tolist() == [False, True, False, True]
    assert len(selector.select(candidates(randn(4, 2), ids=ids), 2).indices) == 2
    with pytest.raises(FloatingPointError, match="observe"):
        selector.check()
    selector.check()


# ------------------------------------------------------------------------------------- settings, state, training


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Balanced(grid=0), "at least 1"),
        (lambda: BalancedRemembered(dim=0), "at least 1"),
        (lambda: Balanced(num_samples=0), "at least 1"),
    ],
)
def test_wrong_settings_name_the_fix(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("features", "settings"), [("cut", {}), ("remembered", {}), ("remembered", {"use_loss": False})]
)
@pytest.mark.parametrize("num_samples", [None, 12])
def test_the_state_travels(features, settings, num_samples):
    first, second = (SOURCES[features](num_samples=num_samples, **settings) for _ in range(2))
    shapes = {k: getattr(v, "shape", None) for k, v in first.state_dict().items()}
    ids, x = torch.arange(12), randn(12, 80)
    first.watches(Net())
    first.note(candidates(size=12, ids=ids), None, x)
    first.observe(candidates(size=12, ids=ids), None, torch.arange(12.0))
    state = first.state_dict()
    if num_samples:
        assert shapes == {k: getattr(v, "shape", None) for k, v in state.items()}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    a, b = (s.select(candidates(x, ids=ids), 5).indices for s in (first, second))
    assert torch.equal(a, b)
    for selector in (first, second):
        selector.note(candidates(size=12, ids=ids), None, x.flip(0))
    a, b = (s.select(candidates(x, ids=ids), 5).indices for s in (first, second))
    assert torch.equal(a, b)
    if features == "remembered":
        assert second.state_dict()["width"] == 80
        with pytest.raises(ValueError, match="now has 70 channels, and 80"):
            second.note(candidates(size=12, ids=ids), None, x[:, :70])
        second.load_state_dict(BalancedRemembered(num_samples=num_samples, **settings).state_dict())  # a new beginning
        second.note(candidates(size=12, ids=ids), None, x[:, :70])
        torch.testing.assert_close(second.state_dict()["features"], x[:, :70] @ projection(70, 64))
    assert first.config() == second.config()
    assert first.config()["num_samples"] == num_samples


@pytest.mark.parametrize("features", ["cut", "remembered"])
def test_no_step_waits_for_the_device(features, monkeypatch):
    monkeypatch.setattr(memories, "_on_host", lambda ids: False)
    selector, ids, source = SOURCES[features](num_samples=30), torch.arange(20), generator(0)
    selector.watches(Net())
    x, losses, labels = randn(20, 70), torch.rand(20), torch.arange(20) % 3
    soft = F.one_hot(labels, 3).float()
    with NoWaiting():
        for targets in (labels, soft, None):
            now = candidates(x, source, ids=ids, targets=targets)
            rows = selector.select(now, 9).indices
            selector.learn(now, rows)
            selector.note(now, rows, x[rows])
            selector.observe(now, rows, losses[rows])
        with pytest.raises(AssertionError, match="waits"):
            losses[0].item()
    selector.check()


@pytest.mark.parametrize("features", ["cut", "remembered"])
def test_it_works_in_a_training_loop(features):
    torch.manual_seed(0)
    net, size = Net(), 20
    x, y, ids = torch.randn(size, 3, 6, 6), torch.arange(size) % 4, torch.arange(size)
    selector = SOURCES[features](num_samples=size)
    at = "body" if features == "cut" else None
    blocker = ForwardBlocker(net, at, 0.5, selector=selector, schedule=Schedule(1, unit="step"))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(4):
        part, part_y, rows = blocker(x, y, torch.arange(size), ids=ids)
        with torch.no_grad():
            entered = net.body(part).mean((2, 3))
        losses = F.cross_entropy(net(part), part_y, reduction="none")
        blocker.observe(losses)
        losses.mean().backward()
        optimizer.step()
        assert len(part) == (10 if step else 20)
        if step:
            assert ((part_y.bincount(minlength=4) - 2.5).abs() < 1).all()
        state = selector.state_dict()
        torch.testing.assert_close(state["losses"][rows].squeeze(1), losses.detach())
        assert not state["losses"].isnan().any()
        if features == "remembered":
            torch.testing.assert_close(state["features"][rows, :6], entered)
    assert blocker.stats.steps == 4
