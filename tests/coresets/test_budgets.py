"""Budgets: what each class may retain, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from halfway.coresets.budgets import groups


def labels_of(sizes):
    return torch.cat([torch.full((size,), c) for c, size in enumerate(sizes)])


@pytest.mark.parametrize("keep", [0.1, 0.29, 0.3, 0.5, 0.7, 0.95])
@pytest.mark.parametrize("sizes", [[10, 10, 10], [7, 13, 29, 101], [50, 1, 2], [1, 1, 98]])
def test_classes_share_exactly_the_budget_in_proportion(keep, sizes):
    total = round(keep * sum(sizes))
    found = [group.budget for group in groups(labels_of(sizes), keep, len(sizes))]
    assert sum(found) == total
    assert min(found) >= 1
    if min(keep * size for size in sizes) >= 1:
        assert all(count in (math.floor(keep * n), math.ceil(keep * n)) for count, n in zip(found, sizes, strict=True))


def test_the_remainder_goes_to_the_largest_fractions():
    # 3.5, 4.9, 2.1 and 6.3, together 17: two are missing after rounding down.
    assert [group.budget for group in groups(labels_of([5, 7, 3, 9]), 0.7, 4)] == [4, 5, 2, 6]


def test_groups_hold_the_samples_of_their_class_in_order():
    labels = torch.tensor([2, 0, 1, 0, 2, 1, 0, 2])
    assert [group.ids.tolist() for group in groups(labels, 0.5, 3)] == [[1, 3, 6], [2, 5], [0, 4, 7]]
    (only,) = groups(labels, 0.5, 3, class_balance=False)
    assert only.ids.tolist() == list(range(8))
    assert only.budget == 4


@pytest.mark.parametrize("keep", [0, 1, -0.1, 1.5, float("nan")])
def test_a_share_outside_of_0_and_1_is_refused(keep):
    with pytest.raises(ValueError, match=r"between 0 and 1.*keep=1-p"):
        groups(labels_of([5, 5]), keep, 2)


def test_what_has_too_few_samples_is_refused():
    with pytest.raises(ValueError, match="fewer samples than classes"):
        groups(torch.tensor([0, 1]), 0.5, 3)
    with pytest.raises(ValueError, match="class 1; number"):
        groups(torch.tensor([0, 0, 2, 2]), 0.5, 3)
    with pytest.raises(
        ValueError, match=r"fewer than the 10 classes; take keep of at least 0\.1, or class_balance=False"
    ):
        groups(torch.arange(100) % 10, 0.05, 10)
    with pytest.raises(ValueError, match="is none; take a larger keep"):
        groups(torch.zeros(10, dtype=torch.int64), 0.01, 1)
    assert groups(torch.arange(100) % 10, 0.05, 10, class_balance=False)[0].budget == 5
    # A class may be missing where classes do not matter.
    assert groups(torch.tensor([0, 0, 2, 2]), 0.5, 3, class_balance=False)[0].budget == 2
