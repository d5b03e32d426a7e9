"""Taking samples out of a tensor: fast, and in the memory layout the tensor had."""

from __future__ import annotations

from torch import Tensor


def memory_order(t: Tensor) -> tuple[int, ...] | None:
    """The axes of a dense tensor from the slowest to the fastest in memory; None if it is contiguous already
    (nothing to do) or not dense (nothing to preserve)."""
    if t.is_contiguous():
        return None
    strides = t.stride()
    order = tuple(sorted(range(t.ndim), key=lambda d: (-strides[d], d)))
    return order if t.permute(order).is_contiguous() else None


def take(t: Tensor, indices: Tensor, dim: int = 0) -> Tensor:
    """`t.index_select(dim, indices)`, but channels_last stays channels_last.

    index_select copies whole rows, which on a CPU is two to three times faster than `t[indices]`, but always returns
    a contiguous tensor. So it is applied to the permuted view of `t` that is contiguous.
    """
    order = memory_order(t)
    if order is None:
        return t.index_select(dim, indices)
    back = sorted(range(t.ndim), key=order.__getitem__)
    return t.permute(order).index_select(order.index(dim % t.ndim), indices).permute(back)
