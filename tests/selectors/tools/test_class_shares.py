"""Targets of several kinds, as one probability per class."""

import pytest
import torch

from halfway.selectors.tools.class_shares import class_shares
from tests.helpers.classified import CLASSES, some_targets

CPU = torch.device("cpu")


def slow_shares(targets):
    """One sample and one pixel at a time."""
    rows, labelled = [], []
    for target in targets:
        if target.is_floating_point():
            rows.append(target.tolist())
            labelled.append(True)
            continue
        counts, ignored = [0] * CLASSES, [255] if target.ndim else []
        for value in target.flatten().tolist():
            if value >= 0 and value not in ignored:
                counts[value] += 1
        labelled.append(sum(counts) > 0)
        rows.append([n / max(sum(counts), 1) for n in counts])
    return torch.tensor(rows), torch.tensor(labelled)


@pytest.mark.parametrize("kind", ["classes", "ignored classes", "soft", "masks"])
def test_they_are_counted_one_by_one(kind):
    targets = some_targets(kind)
    found = class_shares(targets, len(targets), CLASSES, CPU)
    shares, labelled = slow_shares(targets)
    torch.testing.assert_close(found.shares_BC, shares)
    assert torch.equal(found.labelled_B, labelled)
    assert not found.wrong


@pytest.mark.parametrize(
    ("targets", "right"),
    [
        (torch.tensor([0, 1, CLASSES]), [True, True, False]),
        (torch.tensor([0, 1, 255]), [True, True, False]),  # ignored in masks only
        (torch.eye(3, CLASSES) * torch.tensor([[1.0], [1.0], [0.9]]), [True, True, False]),
        (torch.eye(3, CLASSES) * torch.tensor([[1.0], [1.0], [torch.nan]]), [True, True, False]),
        (torch.tensor([[1.0, 0, 0, 0, 0], [2.0, -1, 0, 0, 0]]), [True, False]),
    ],
)
def test_a_row_that_says_nothing_of_these_classes_is_no_label(targets, right):
    found = class_shares(targets, len(targets), CLASSES, CPU)
    assert found.wrong
    assert found.labelled_B.tolist() == right
    assert (found.shares_BC[-1] == 0).all()


@pytest.mark.parametrize(
    "targets",
    [
        torch.zeros(3),  # regression
        torch.zeros(3, CLASSES + 1),
        torch.zeros(3, CLASSES, dtype=torch.int64),  # tokens
        torch.zeros(3, 4, 4),
        torch.zeros(3, 1, 4, 4, dtype=torch.int64),
        torch.zeros(4, dtype=torch.int64),  # of another batch
        [{"boxes": torch.zeros(1, 4)}] * 3,
        None,
    ],
)
def test_other_targets_are_none(targets):
    assert class_shares(targets, 3, CLASSES, CPU) is None
