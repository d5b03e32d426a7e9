"""Steps that work while the samples lie elsewhere than in front: folded with time or views, or in the last axis.

Max pooling is the hard one. Its indices are integers, which say nothing when they are compared as numbers, and its
gradients follow them; where samples lie inside of the pooled plane, they even depend on how many samples there are.
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import CHANNELS, Step


class Folded(Step):
    """Fold, convolve, pool or drop, and unfold.

    fold: (N, C, H, W) becomes
        channels: (C N, 1, H, W), as time-major frames do;
        frames: (N C, 1, H, W), sample by sample;
        views: (2 N, C, H, W), a second view behind the first;
        middle: (H N W, C, 1, 1), samples in the middle;
        last: (W, C, H, N), samples in the last axis, beside which everything happens.
    """

    KINDS = ("max_pool2d", "max_pool1d", "max_pool3d", "adaptive", "windows", "unpool", "fractional")
    KINDS += ("dropout", "dropout_rows", "softmax", "gelu", "norm", "maximum")

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__(rng, kind)
        self.fold = rng.choice(["channels", "frames", "views", "views", "middle", "last", "last"])
        inside = {"channels": 1, "frames": 1}.get(self.fold, CHANNELS)
        self.conv = nn.Conv2d(inside, inside, (3, 1), padding=(1, 0))
        self.rough = self.kind not in ("dropout", "dropout_rows", "softmax", "gelu", "norm")

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        if self.fold == "channels":
            y = self._act(self.conv(x.transpose(0, 1).reshape(c * n, 1, h, w)), 0, c)
            return y.reshape(c, n, h, w).transpose(0, 1)
        if self.fold == "frames":
            return self._act(self.conv(x.reshape(n * c, 1, h, w)), 0, 1).reshape(n, c, h, w)
        if self.fold == "views":
            first, second = self._act(self.conv(torch.cat([x, x.flip(-1)])), 0, 2).chunk(2)
            return first + 0.5 * second
        if self.fold == "middle":
            y = self._act(self.conv(x.permute(2, 0, 3, 1).reshape(h * n * w, c, 1, 1)), 0, h)
            return y.reshape(h, n, w, c).permute(1, 3, 0, 2)
        return self._act(self.conv(x.permute(3, 1, 2, 0)), 3, 1).permute(3, 1, 2, 0)

    def _act(self, y: Tensor, axis: int, before: int) -> Tensor:
        """Something on (M, C, H, W) that leaves the last axis alone; the samples lie in `axis`, see `Note.cut`."""
        if self.kind == "max_pool2d":
            return F.max_pool2d(y, (3, 1), 1, (1, 0))
        if self.kind == "max_pool1d":
            return F.max_pool1d(y.transpose(2, 3).flatten(1, 2), 3, 1, 1).unflatten(1, (-1, y.shape[3])).transpose(2, 3)
        if self.kind == "max_pool3d":
            return F.max_pool3d(y.unsqueeze(2), (1, 3, 1), 1, (0, 1, 0)).squeeze(2)
        if self.kind == "adaptive":
            return y + F.adaptive_max_pool2d(y, (1, y.shape[3]))
        if self.kind == "windows":
            return F.pad(y, (0, 0, 1, 1)).unfold(2, 3, 1).amax(-1)
        if self.kind == "maximum":
            return y + 0.5 * y.max(2, keepdim=True).values
        if self.kind == "unpool" and y.shape[2] > 1:
            pooled, indices = F.max_pool2d(y, (2, 1), return_indices=True)
            return y + F.max_unpool2d(pooled, indices, (2, 1), output_size=y.shape[2:])
        if self.kind == "fractional" and min(y.shape[2:]) > 1 and axis == 0:
            where = self.drawn(lambda: torch.rand(*y.shape[:2], 2, dtype=y.dtype), axis, before)
            return y + F.fractional_max_pool2d(y, 2, 1, _random_samples=where)
        if self.kind == "dropout":
            return y * self.drawn(lambda: F.dropout(torch.ones_like(y), 0.3), axis, before)
        if self.kind == "dropout_rows":
            shape = [s if d == axis else 1 for d, s in enumerate(y.shape)]
            return y * self.drawn(lambda: F.dropout(y.new_ones(shape), 0.3), axis, before)
        if self.kind == "softmax":
            return 2 * y.softmax(2)
        if self.kind == "norm":
            return F.layer_norm(y.transpose(2, 3), y.shape[2:3]).transpose(2, 3) if y.shape[2] > 1 else y
        return F.gelu(y)
