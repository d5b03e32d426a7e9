"""The Adaptive Distribution Estimation (ADE) of the paper: a mixture of C kernels that follows the training.

`DensityEstimator` only holds state. The mathematics is in `functional`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from . import functional as PF
from .functional import BandwidthRule, UpdateRule


class DensityEstimator(nn.Module):
    """How common is a representation among the samples retained so far?

    The first `num_centroids` representations it sees become the centroids, each standing for one sample; from then
    on centroids move with the samples assigned to them. Counts are int64: float32 stops counting at 16.7 million.

    Args:
        num_centroids: C, kernels in the mixture.
        dim: D, length of a representation.
        bandwidth: "silverman" (default), "scott" or "identity" (Eq. 6).
        update_rule: "convex" (default) or "as_printed" (Eq. 8; see `functional.update_centroids`).
        kernel_weights: weigh kernels by the samples they stand for (Eq. 9); False is the paper's ablation.
        beta: weight of the past in Eq. 8.

    Buffers:
        centroids: (C, D) float32.
        counts: (C,) int64; 0 marks a centroid that is not filled yet.
    """

    centroids: Tensor
    counts: Tensor

    def __init__(
        self,
        num_centroids: int = 64,
        dim: int = 128,
        bandwidth: BandwidthRule = "silverman",
        update_rule: UpdateRule = "convex",
        kernel_weights: bool = True,
        beta: float = 0.01,
    ) -> None:
        super().__init__()
        if num_centroids < 1 or dim < 1:
            raise ValueError(f"num_centroids and dim must be at least 1, got num_centroids={num_centroids}, dim={dim}")
        if bandwidth not in get_args(BandwidthRule):
            raise ValueError(f"unknown bandwidth {bandwidth!r}; choose one of {get_args(BandwidthRule)}")
        if update_rule not in get_args(UpdateRule):
            raise ValueError(f"unknown update_rule {update_rule!r}; choose one of {get_args(UpdateRule)}")
        if not 0 <= beta < 1:
            raise ValueError(f"beta is the weight of the past and must be in [0, 1), got {beta}")
        self.num_centroids = num_centroids
        self.dim = dim
        self.bandwidth = bandwidth
        self.update_rule = update_rule
        self.kernel_weights = kernel_weights
        self.beta = beta
        self.register_buffer("centroids", torch.zeros(num_centroids, dim))
        self.register_buffer("counts", torch.zeros(num_centroids, dtype=torch.int64))
        # Known on the host, so that a step never has to ask the device how far the filling has come.
        self._filled = 0

    @property
    def ready(self) -> bool:
        """Whether all centroids are filled: before that there is no density to speak of."""
        return self._filled == self.num_centroids

    @torch.no_grad()
    def log_density(self, x: Tensor) -> Tensor:
        """(B, D) -> (B,) log densities (Eq. 4)."""
        self._check(x)
        if not self.ready:
            raise RuntimeError(
                f"only {self._filled} of {self.num_centroids} centroids are filled; call update() on more samples first"
            )
        counts = self.counts if self.kernel_weights else None
        return PF.log_density(x.to(self.centroids.dtype), self.centroids, counts, self.bandwidth)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Learn from the retained samples' representations (S, D) (Eq. 7 and 8).

        A batch with a value that is not finite leaves the state as it was.
        """
        self._check(x)
        x = x.to(self.centroids.dtype)
        if not self.ready:
            x = self._fill(x)
        if len(x) == 0:
            return
        sums, arrivals = PF.cluster_sums(x, self.centroids)
        centroids, counts = PF.update_centroids(
            self.centroids, self.counts, sums, arrivals, self.beta, self.update_rule
        )
        finite = centroids.isfinite().all()
        self.centroids.copy_(torch.where(finite, centroids, self.centroids))
        self.counts.copy_(torch.where(finite, counts, self.counts))

    def _fill(self, x: Tensor) -> Tensor:
        """Take the missing centroids from the front of x; the rest is returned. The one place that reads a value
        back to the host, and only until the centroids are complete: a centroid must never start as NaN."""
        if not x.isfinite().all():
            return x[:0]
        taken = min(self.num_centroids - self._filled, len(x))
        self.centroids[self._filled : self._filled + taken] = x[:taken]
        self.counts[self._filled : self._filled + taken] = 1
        self._filled += taken
        return x[taken:]

    def _check(self, x: Tensor) -> None:
        if x.ndim != 2 or x.shape[1] != self.dim:
            raise ValueError(f"expected representations of shape (samples, {self.dim}), got {tuple(x.shape)}")

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._filled = int((self.counts > 0).sum())

    def extra_repr(self) -> str:
        return (
            f"num_centroids={self.num_centroids}, dim={self.dim}, bandwidth={self.bandwidth!r}, "
            f"update_rule={self.update_rule!r}, kernel_weights={self.kernel_weights}, beta={self.beta}"
        )
