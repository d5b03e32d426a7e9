"""What a sampler cannot work with: refused when it is made, or when losses are reported."""

from __future__ import annotations

import operator
from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor


def length_of(data: Any) -> int:
    """Of a data set, or the length that was given."""
    try:
        size = len(data) if isinstance(data, Sized) else operator.index(data)
    except TypeError:
        raise TypeError(
            f"data must be a data set with a length, or its length, got a {type(data).__name__}; an iterable data set "
            "cannot be sampled from"
        ) from None
    if size < 1:
        raise ValueError("the data set is empty" if size == 0 else f"the length must be at least 1, got {size}")
    return size


def check_ids(ids: Any, num_samples: int) -> None:
    """They are (B,) positions in the data set."""
    if not isinstance(ids, Tensor) or ids.ndim != 1 or ids.dtype == torch.bool or ids.dtype.is_floating_point:
        raise ValueError(f"ids must be a tensor of whole numbers, one per sample, shape (B,), got {_described(ids)}")
    # Ids on a device are checked by the memory, without making the host wait.
    if ids.device.type == "cpu" and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_samples:
        raise ValueError(
            f"ids must be from 0 to {num_samples - 1}, the samples' positions in the data set, got "
            f"{int(ids.min())} to {int(ids.max())}"
        )


def check_observed(ids: Any, losses: Any, num_samples: int) -> None:
    """There is one loss for each of the ids."""
    check_ids(ids, num_samples)
    if not isinstance(losses, Tensor) or losses.shape != ids.shape or not losses.is_floating_point():
        raise ValueError(
            f"losses must be a float tensor with one loss per id, shape ({len(ids)},), got {_described(losses)}; "
            "compute them with reduction='none' (and average over pixels or tokens yourself)"
        )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
