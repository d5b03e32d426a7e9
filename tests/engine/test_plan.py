"""What is learned about a recorded operation: whose its rows are, and when a comparison counts."""

from __future__ import annotations

import torch

from halfway.engine.plan import Op, RowLayout

POOL = torch.ops.aten.max_pool2d_with_indices.default
ROWS = torch.tensor([0, 2, 5])


def proven(recorded_places: torch.Tensor, x: torch.Tensor) -> Op:
    """A max pooling of six samples, recorded with these places of its maxima, beside one of three of them."""
    maxima, _ = POOL(x, [2, 2])
    op = Op(POOL, "", options=[[RowLayout(0)], [RowLayout(0)]])
    part = x[ROWS]
    assert op.prove([maxima, recorded_places], POOL(part, [2, 2]), (part,), ROWS, len(x), rehearsed=True) == ""
    return op


def test_of_two_equal_maxima_either_may_have_been_taken() -> None:
    """Rounding breaks a tie in one way for all samples and in another one for some."""
    x = torch.rand(6, 1, 1, 1) * torch.ones(6, 1, 2, 4)  # flat, as the background of a drawing
    first = POOL(x, [2, 2])[1]
    for places in (first, first + 1, first + 4):
        op = proven(places, x)
        assert op.proven
        assert not op.computed


def test_places_that_hold_no_maximum_are_not_replayed() -> None:
    torch.manual_seed(0)
    x = torch.rand(6, 1, 2, 4)
    op = proven((POOL(x, [2, 2])[1] + 1) % 8, x)
    assert not op.proven
    assert "whole numbers" in op.computed


def test_places_outside_of_a_sample_are_not_replayed() -> None:
    """As of a pooling in which several samples lie side by side."""
    x = torch.rand(6, 1, 1, 1) * torch.ones(6, 1, 2, 4)
    op = proven(POOL(x, [2, 2])[1] + 8, x)
    assert not op.proven
    assert "whole numbers" in op.computed
