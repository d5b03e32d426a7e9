"""A small network and batches for each rank, and whether ranks agree."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfway import Density

N, CLASSES = 12, 5
GROUP = "distributed"


def small_net(seed: int = 0) -> nn.Module:
    """A shallow part without BatchNorm, so that retained samples alone give the same gradients; a deep part with."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1)),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(8 * 9, CLASSES),
    )


def batch(rank: int, step: int, size: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(size, 3, 8, 8, generator=generator)
    return x, torch.randint(0, CLASSES, (size,), generator=generator)


def selector() -> Density:
    return Density(num_centroids=16)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def averaged(tensors: list[Tensor]) -> list[Tensor]:
    for t in tensors:
        dist.all_reduce(t)
        t /= dist.get_world_size()
    return tensors


def assert_same_everywhere(state: dict[str, Any]) -> None:
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    for other in states:
        assert all(torch.equal(torch.as_tensor(state[k]), torch.as_tensor(other[k])) for k in state)
