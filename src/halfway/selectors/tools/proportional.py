"""Weights that follow the losses on their own scale: how much likelier a hard sample is to be drawn than an easy one.

Ranks and standardised scores prefer the hard half of every batch equally, whatever the losses are. These weights do so
only as far as the losses differ: hardly while all are of one size, strongly once most of them are near zero.

Shape suffix: B candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .draw import inclusion_probabilities
from .last_losses import known_or_mean

Scale = Literal["loss", "bounded"]


def weights(
    losses_B: Tensor,
    known_B: Tensor | None = None,
    *,
    scale: Scale = "loss",
    floor: float = 0.1,
    temperature: float = 1.0,
    cap: float | Tensor | None = None,
) -> Tensor:
    """(B,) float64, (g + floor x mean g)^(1 / temperature) up to a common factor: the largest is 1.

    The mean is over the samples of the batch that count. An unknown loss, or one above `cap`, does not count and gets
    that mean as its g. If none counts, or if all g are 0, all samples have the same weight.

    Args:
        losses_B: (B,). Negative ones count as 0.
        known_B: (B,) bool, which losses are known; None: those that are finite.
        scale: g is the loss itself, or "bounded", 1 - exp(-loss): the probability of being wrong, if the loss is the
            cross-entropy.
        floor: every sample gets this much of the mean on top.
        temperature: small prefers the largest more strongly, large is random.
        cap: losses above count as average.
    """
    losses_B = losses_B.to(torch.float64)
    counts_B = losses_B.isfinite() if known_B is None else known_B & losses_B.isfinite()
    if cap is not None:
        counts_B = counts_B & (losses_B <= cap)
    g_B = losses_B.clamp_min(0)
    if scale == "bounded":
        g_B = -torch.expm1(-g_B)
    g_B, mean, _ = known_or_mean(torch.where(counts_B, g_B, torch.nan))
    w_B = g_B + floor * mean
    # Divided by the largest before the power, which may not become infinite.
    largest = w_B.max()
    return torch.where(largest > 0, w_B / largest, 1.0) ** (1 / temperature)


@dataclass(frozen=True)
class Proportions:
    """The settings of `weights`, checked.

    Args:
        scale, floor, temperature: see `weights`.
        cap: a loss above it counts as average; "chance": ln C, the loss of a guess among C classes; None: no cap.
        num_classes: C, only for "chance".
    """

    scale: Scale = "loss"
    floor: float = 0.1
    temperature: float = 1.0
    cap: float | str | None = None
    num_classes: int | None = None

    def __post_init__(self) -> None:
        if self.scale not in get_args(Scale):
            raise ValueError(f"scale must be one of {', '.join(map(repr, get_args(Scale)))}, got {self.scale!r}")
        if not 0 <= self.floor < math.inf:
            raise ValueError(f"floor is a share of the mean and must not be negative, got {self.floor}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        if isinstance(self.cap, str):
            if self.cap != "chance":
                raise ValueError(f"cap must be a loss, 'chance' or None, got {self.cap!r}")
            if self.num_classes is None or self.num_classes < 2:
                raise ValueError(
                    f"cap='chance' is the loss of a guess among all classes: pass num_classes, at least 2 (got "
                    f"{self.num_classes}), or the loss itself as cap"
                )
        elif self.cap is not None and not self.cap > 0:
            raise ValueError(f"cap is a loss and must be positive, got {self.cap}")

    @property
    def largest(self) -> float | None:
        """The cap as a number."""
        if isinstance(self.cap, str):
            assert self.num_classes is not None
            return math.log(self.num_classes)
        return self.cap

    def weights(self, losses_B: Tensor) -> Tensor:
        """(B,) losses, NaN where unknown, to (B,) weights."""
        return weights(losses_B, scale=self.scale, floor=self.floor, temperature=self.temperature, cap=self.largest)

    def probabilities(self, losses_B: Tensor, count: int) -> Tensor:
        """(B,) losses, NaN where unknown, to the probabilities (B,) min(1, c w) that add up to `count`."""
        return inclusion_probabilities(self.weights(losses_B), count, smallest=0.0)
