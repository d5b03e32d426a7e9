"""Steps that read a value on the host, in every way there is, and act on it.

A replay reads on the retained samples what the probe read on all of them. If that is the same, both passes went the
same way; if not, the step is to be recomputed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .base import CHANNELS, Step

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool(t.sum() > 0.02),
    "if": lambda t: 1 if t.any() else 0,
    "float": lambda t: float(t.sum()),
    "int": lambda t: int(t.sum()),
    "tolist": lambda t: sum(t.tolist()),
    "numpy": lambda t: t.numpy().sum(),
    "numpy_force": lambda t: t.numpy(force=True).sum(),
    "asarray": lambda t: np.asarray(t).sum(),
    "largest": lambda t: max(t),
    "cpu_numpy": lambda t: t.cpu().numpy().sum(),
    "dlpack": lambda t: np.from_dlpack(t).sum(),
    "iterate": lambda t: sum(float(v) for v in t),
    "format": lambda t: float(f"{t.sum():.4f}"),
    "index": lambda t: [0.0, 1.0, 2.0, 3.0][min(t.gt(0.02).sum(), torch.tensor(3))],
    "range": lambda t: len(range(t.gt(0.02).sum())),
    "equal": lambda t: torch.equal(t, torch.zeros_like(t)),
    "allclose": lambda t: torch.allclose(t, torch.zeros_like(t)),
    "contains": lambda t: 1.0 in t,
    "nonzero": lambda t: len(torch.nonzero(t)),
    "unique": lambda t: len(torch.unique(t)) - 1,
    "select": lambda t: t[t > 0.02].numel(),
    "is_nonzero": lambda t: torch.is_nonzero(t.sum()),
}


class Read(Step):
    """Acts on a value that it reads.

    what: what is read. A value of the batch, which differs between all and some samples; whether it is large, which
        may be the same; or one of the parameters.
    how: it chooses a layer, or a factor that no operation shows, or is the factor.
    """

    KINDS = tuple(READS)

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.ways = nn.ModuleList([nn.Conv2d(CHANNELS, CHANNELS, 1) for _ in range(2)])
        self.what = rng.choice(["mean", "large", "large", "signs", "signs", "extreme", "parameter"])
        self.how = rng.choice(["layer", "choice", "choice", "factor"])
        self.rough = True

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "mean":
            seen = x.mean().view(1)
        elif self.what == "large":
            seen = (x.mean() > 0.02).view(1)
        elif self.what == "signs":
            seen = x.mean((0, 2, 3)) > 0.02
        elif self.what == "extreme":
            seen = (x.abs().amax() > 2.5).view(1)
        else:
            seen = self.ways[0].weight.mean().view(1)
        value = float(READS[self.kind](seen.detach().double()))
        large = value > 0.02  # not 0: that is what the mean behind a BatchNorm is, but for rounding
        if self.how == "layer":
            return self.ways[large](x)
        if self.how == "choice":
            return self.ways[0](x * 2 if large else x)
        return self.ways[0](x * (0.5 + 0.5 * min(abs(value), 3.0)))
