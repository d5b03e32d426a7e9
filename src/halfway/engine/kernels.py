"""Two operations for which PyTorch's CPU kernels are slow on contiguous maps, in passes that are fast.

Used in the probe only, whose time is all overhead. Same values: the maxima bit for bit, the statistics to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# E[x^2] - E[x]^2 loses about log10(this) digits of float32's seven where the mean is that far from zero, in variances.
_SQUARED_MEAN_OVER_VARIANCE = 16.0


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)`, by the faster way where there is one."""
    if func is aten.max_pool2d_with_indices.default and _slow(args[0]) and args[0].ndim == 4:
        x = args[0].contiguous(memory_format=torch.channels_last)
        return tuple(t.contiguous() for t in func(x, *args[1:], **kwargs))
    return func(*args, **kwargs)


def moments(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Mean and (biased) variance of each channel, x (N, C, ...); None where PyTorch's own kernel does it well."""
    if not _slow(x) or x.ndim < 3:
        return None
    spatial = tuple(range(2, x.ndim))
    count = x.numel() // x.shape[1]
    mean = x.sum(spatial).sum(0).div_(count)
    variance = _mean_square(x, spatial, count) - mean.square()
    if bool((mean.square() > _SQUARED_MEAN_OVER_VARIANCE * variance).any()):
        variance = _mean_square(x - mean.view(-1, *(1 for _ in spatial)), spatial, count)
    return mean, variance


def _mean_square(x: Tensor, spatial: tuple[int, ...], count: int) -> Tensor:
    return torch.linalg.vector_norm(x, dim=spatial).square_().sum(0).div_(count)


def _slow(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and x.is_contiguous()
