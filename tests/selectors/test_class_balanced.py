"""Class-balanced pruning: every class as often as any other, by whom it draws or by weights."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import halfway
from halfway.selectors import Candidates, ClassBalanced
from tests.helpers.draws import generator, within

# 8, 4, 2 and 1 samples of four classes.
CLASSES = torch.tensor([0] * 8 + [1] * 4 + [2] * 2 + [3])
COUNTS = [800, 400, 200, 100]


def candidates(targets=CLASSES, source=0):
    return Candidates(len(targets), generator(source) if isinstance(source, int) else source, targets=targets)


def slow_probabilities(weights, count):
    """min(1, c w), where c is found by bisection so that they add up to `count`."""
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(min(1.0, middle * w) for w in weights) < count else (low, middle)
    return [min(1.0, high * w) for w in weights]


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("counts", [None, COUNTS])
def test_probabilities_follow_the_sizes_of_the_classes_against_a_reference(q, counts):
    sizes = [CLASSES.tolist().count(c) for c in CLASSES.tolist()]  # in proportion to COUNTS
    found = ClassBalanced(q, class_counts=counts).select(candidates(), 6)
    expected = slow_probabilities([n ** (q - 1) for n in sizes], 6)
    assert found.importance.tolist() == pytest.approx(expected, abs=1e-9)


def test_each_class_is_drawn_equally_often_as_far_as_it_comes():
    selector, source, draws = ClassBalanced(class_counts=COUNTS), generator(1), 600
    drawn = torch.zeros(len(CLASSES))
    for _ in range(draws):
        rows = selector.select(candidates(source=source), 6).indices
        assert rows.tolist() == sorted(set(rows.tolist()))
        drawn[rows] += 1
    share = drawn / draws
    # 6 samples of four classes: the only one of class 3 always, 5/3 of each other class.
    assert share[14] == 1
    for c, n in ((0, 8), (1, 4), (2, 2)):
        assert all(within(s, 5 / 3 / n, draws) for s in share[c == CLASSES].tolist())


@pytest.mark.parametrize("q", [0.0, 0.5])
@pytest.mark.parametrize("counts", [[8, 4, 2, 1], [8, 0, 4, 0, 0, 3]])
def test_weights_have_a_mean_of_1_over_the_data(q, counts):
    """Also if the data have no sample of some class: else the loss, and so the step, would be a fraction of it."""
    data = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    found = ClassBalanced(q, by="weights", class_counts=counts).select(candidates(data), len(data))
    assert float(found.weights.mean()) == pytest.approx(1)
    of_class = {int(c): float(w) for c, w in zip(data, found.weights, strict=True)}
    rarest, commonest = min(of_class.values()), max(of_class.values())
    assert commonest / rarest == pytest.approx((8 / min(n for n in counts if n)) ** (1 - q))


def test_with_q_0_a_class_weighs_n_over_its_share():
    found = ClassBalanced(by="weights", class_counts=COUNTS).select(candidates(), 6)
    expected = [sum(COUNTS) / (4 * COUNTS[c]) for c in CLASSES[found.indices].tolist()]  # N / (C n)
    assert found.weights.tolist() == pytest.approx(expected)
    assert found.weights.dtype == torch.float32
    batch = ClassBalanced(by="weights").select(candidates(), 15)  # all of them: sizes are those of the batch
    assert float(batch.weights.mean()) == pytest.approx(1)


def test_weighted_rows_are_those_of_random_pruning():
    weighted = ClassBalanced(by="weights").select(candidates(source=3), 6)
    assert torch.equal(weighted.indices, halfway.Random().select(candidates(source=3), 6).indices)


def test_with_q_1_the_draw_is_uniform_and_all_weights_are_1():
    assert ClassBalanced(1.0).select(candidates(), 6).importance.tolist() == pytest.approx([6 / 15] * 15)
    weights = ClassBalanced(1.0, by="weights", class_counts=COUNTS).select(candidates(), 6).weights
    assert weights.tolist() == pytest.approx([1.0] * 6)


def test_mixed_labels_count_as_their_largest_class():
    probabilities = torch.nn.functional.one_hot(CLASSES, 4) * 0.8 + 0.05
    soft = ClassBalanced(class_counts=COUNTS).select(candidates(probabilities), 6)
    assert torch.equal(soft.importance, ClassBalanced(class_counts=COUNTS).select(candidates(), 6).importance)


@pytest.mark.parametrize("counts", [None, [3, 1]])
def test_a_sample_without_a_label_counts_as_average(counts):
    targets = torch.tensor([0, 0, 0, 1, -1])
    found = ClassBalanced(by="weights", class_counts=counts).select(candidates(targets), 5)
    assert found.weights.tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2, 1])


def test_a_class_without_a_count_is_an_error_at_the_next_check():
    selector = ClassBalanced(class_counts=[5, 5])
    selector.check()
    assert len(selector.select(candidates(torch.tensor([0, 1, 2, 0])), 2).indices) == 2
    with pytest.raises(ValueError, match=r"beyond the last of its class_counts \[5, 5\]; pass the counts of all"):
        selector.check()
    selector.check()


def test_a_class_that_the_counts_have_none_of_is_the_rarest():
    found = ClassBalanced(class_counts=[10, 0, 90]).select(candidates(torch.tensor([0, 1, 2, 2])), 1)
    assert found.importance.argmax() == 1
    assert torch.isfinite(found.importance).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"q": 1.5}, "q must lie in"),
        ({"by": "loss"}, "by must be one of 'draws', 'weights', got 'loss'"),
        ({"class_counts": [4]}, "of two or more classes"),
        ({"class_counts": 5}, "of two or more classes"),
        ({"class_counts": Counter([0, 0, 1])}, "in the order of the classes"),
        ({"class_counts": torch.ones(2, 2)}, "torch.bincount"),
        ({"class_counts": [4, -1]}, "torch.bincount"),
        ({"class_counts": [0, 0]}, "torch.bincount"),
        ({"class_counts": [1.5, 2]}, "class_counts must be a whole number"),
    ],
)
def test_wrong_settings_are_errors(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ClassBalanced(**settings)


@pytest.mark.parametrize("targets", [torch.zeros(4, 8, 8, dtype=torch.long), torch.zeros(4), torch.eye(4).long(), None])
def test_targets_that_are_no_classes_are_an_error_that_says_where_to_look(targets):
    with pytest.raises(ValueError, match=r"needs one class per sample.*target="):
        ClassBalanced().select(Candidates(4, generator(0), targets=targets), 2)


def test_several_classes_per_sample_are_an_error_at_the_next_check():
    selector = ClassBalanced(by="weights", class_counts=[800, 400, 100])
    several = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    found = selector.select(candidates(several), 3)
    assert found.weights[0] == 1, "as without a label"
    with pytest.raises(ValueError, match="no probabilities"):
        selector.check()


def test_counts_may_be_a_tensor_and_the_configuration_is_plain():
    selector = ClassBalanced(class_counts=torch.bincount(CLASSES))
    assert selector.config() == {"q": 0.0, "by": "draws", "class_counts": [8, 4, 2, 1], "target": None}


def test_rare_classes_stay_in_a_training_and_before_loading():
    model = torch.nn.Linear(4, 4)
    blocker = halfway.ForwardBlocker(model, None, 0.6, selector=ClassBalanced(class_counts=COUNTS))
    _, y = blocker(torch.randn(15, 4), CLASSES)
    assert 3 in y.tolist()
    assert len(y) == 6
    batches = halfway.PrunedBatchSampler(
        range(15), 15, 0.6, selector=ClassBalanced(class_counts=COUNTS), targets=CLASSES
    )
    assert all(14 in batch for batch in batches)
