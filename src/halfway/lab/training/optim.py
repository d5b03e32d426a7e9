"""Optimizers and learning-rate policies of the recipes: PyTorch's and timm's."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from ..recipes.schema import LearningRate, OptimizerSettings


def make_optimizer(settings: OptimizerSettings, model: nn.Module) -> Optimizer:
    """SGD decays all weights; LARS and AdamW do not decay biases and normalisation, as is usual for them."""
    common = {"lr": settings.lr, **settings.options}
    if settings.name == "sgd":
        return SGD(model.parameters(), weight_decay=settings.weight_decay, **common)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if settings.name == "adamw":
        return AdamW(groups, **common)
    from timm.optim.lars import Lars

    return Lars(groups, **common)


def make_policy(settings: LearningRate, optimizer: Optimizer, peak: float, steps: int, warmup: int) -> LRScheduler:
    """The learning rate of each of `steps` training steps, the first `warmup` of which raise it."""
    if settings.name == "onecycle":
        # PyTorch divides by the length minus one of both parts, so neither may have exactly one step.
        share = 0.3 if settings.warmup is None else min(max(warmup, 1.5), steps - 0.5) / steps
        return OneCycleLR(optimizer, peak, total_steps=steps, pct_start=share)
    fall = poly if settings.name == "poly" else cosine
    return LambdaLR(optimizer, fall(settings, peak, steps, warmup))


def cosine(settings: LearningRate, peak: float, steps: int, warmup: int) -> Callable[[int], float]:
    """A linear rise, then half a cosine down to `final`; as factors of the peak."""
    from math import cos, pi

    floor = settings.final / peak

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, steps - warmup)
        return floor + (1 - floor) * (1 + cos(pi * min(1.0, done))) / 2

    return factor


def poly(settings: LearningRate, peak: float, steps: int, warmup: int) -> Callable[[int], float]:
    """A linear rise, then (1 - t) ** power down to `final`; as factors of the peak."""
    floor = settings.final / peak

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, steps - warmup)
        return floor + (1 - floor) * (1 - min(1.0, done)) ** settings.power

    return factor
