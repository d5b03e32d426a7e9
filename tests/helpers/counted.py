"""Models whose FLOPs can be worked out, and counting them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfway.engine.flops import FlopCounter, Meter

needs_torchvision = pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="needs torchvision")
needs_timm = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="needs timm")


def torchvision_model(name: str, **options: Any) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name, weights=None, **options)


class Tiny(nn.Module):
    """A stem, two residual blocks (the second is used twice) and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.body = nn.Sequential(Residual(8), nn.Conv2d(8, 8, 3, padding=1))
        self.twice = Residual(8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.twice(self.twice(self.body(self.stem(x))))
        return self.head(self.dropout(h.mean((2, 3))))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Sequential(nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x))


def tiny() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


def metered(model: nn.Module, x: Tensor) -> Meter:
    with Meter() as meter:
        model(x)
    return meter


def counted(model: nn.Module, x: Tensor) -> float:
    with FlopCounter() as counter:
        out = model(x)
        out.square().mean().backward()
    return counter.total
