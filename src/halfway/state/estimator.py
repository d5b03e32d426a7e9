"""The Adaptive Distribution Estimation (ADE) of the paper: a mixture of C kernels that follows the training.

`DensityEstimator` only holds state. The mathematics is in `functional`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from .. import functional
from ..functional import BandwidthRule, UpdateRule
from ..settings import plain_settings
from .flags import StickyFlag
from .ranks import ALONE, PendingSum, Ranks


class DensityEstimator(nn.Module):
    """Estimates how common a representation is among the samples retained so far.

    The first `num_centroids` representations it sees become the centroids, each standing for one sample. From then on
    centroids move with the samples assigned to them. Counts are int64: float32 stops counting at 16.7 million.

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

    Attributes:
        refused: whether a batch was left out because of a value that is not finite; not part of the state.
    """

    centroids: Tensor
    counts: Tensor

    @plain_settings
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
        # On the CPU until the first samples show their device; a default device (`with torch.device("meta")`) may be
        # another one.
        self.register_buffer("centroids", torch.zeros(num_centroids, dim, device="cpu"))
        self.register_buffer("counts", torch.zeros(num_centroids, dtype=torch.int64, device="cpu"))
        self.refused = StickyFlag()
        self._pending: PendingSum | None = None
        # Counted on the host, so that no step has to ask the device how many centroids are filled.
        self._filled = 0

    @property
    def ready(self) -> bool:
        """Whether all centroids are filled; until then there is no density."""
        return self._filled == self.num_centroids

    @torch.no_grad()
    def log_density(self, x: Tensor) -> Tensor:
        """(B, D) -> (B,) log densities (Eq. 4)."""
        self._check(x)
        self.settle()
        if not self.ready:
            raise RuntimeError(
                f"only {self._filled} of {self.num_centroids} centroids are filled; call update() on more samples first"
            )
        counts = self.counts if self.kernel_weights else None
        return functional.log_density(x.to(self.centroids.dtype), self.centroids, counts, self.bandwidth)

    @torch.no_grad()
    def update(self, x: Tensor, ranks: Ranks = ALONE) -> None:
        """Learn from the retained samples' representations (S, D) (Eq. 7 and 8).

        A batch with a value that is not finite leaves the state as it was.

        Args:
            x: (S, D); S may be 0.
            ranks: learn from the samples of all ranks. Each must call this at every step, and all end up with the same
                state, bit for bit. (The samples that are left over when the last centroids are filled are not used.)
                If `ranks.defer` is set, this returns at once, and `settle` waits when the state is needed.
        """
        self._check(x)
        self.settle()
        x = x.to(self.centroids.dtype)
        if ranks.size == 1:
            if not self.ready:
                x = self._fill(x, int(x.isfinite().all()))
            if len(x):
                self._receive(*functional.cluster_sums(x, self.centroids))
            return
        self._pending = ranks.sum(self._pack(x) if self.ready else self._offer(x, ranks), self)
        if not ranks.defer:
            self.settle()

    def send_nothing(self, ranks: Ranks) -> None:
        """Called instead of `update` on a rank that has no batches left."""
        self.update(self.centroids[:0], ranks)

    def settle(self) -> None:
        """Wait for the sum over ranks, and learn from it."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._learn_from(pending.wait())

    @torch.no_grad()
    def _learn_from(self, total: Tensor) -> None:
        if self.ready:
            self._receive(total[:, :-1], total[:, -1].to(torch.int64))
        else:
            # One sample of each rank in turn, so that every rank supplies its share of the centroids.
            rows = total.transpose(0, 1).flatten(0, 1)
            self._fill(rows[rows[:, -1] == 1, :-1], int(total.isfinite().all()))

    def _pack(self, x: Tensor) -> Tensor:
        """(C, D + 1): what each centroid receives from this rank, the number of arrivals in the last column."""
        sums, arrivals = functional.cluster_sums(x, self.centroids)
        return torch.cat([sums, arrivals.to(sums.dtype).unsqueeze(1)], 1)

    def _offer(self, x: Tensor, ranks: Ranks) -> Tensor:
        """(ranks, missing, D + 1): samples to fill the missing centroids with, marked by 1 in the last column."""
        missing = self.num_centroids - self._filled
        offer = x.new_zeros(ranks.size, missing, self.dim + 1)
        offer[ranks.rank, : len(x), :-1] = x[:missing]
        offer[ranks.rank, : len(x), -1] = 1
        return offer

    def _receive(self, sums: Tensor, arrivals: Tensor) -> None:
        centroids, counts = functional.update_centroids(
            self.centroids, self.counts, sums, arrivals, self.beta, self.update_rule
        )
        finite = functional.all_finite(centroids)
        self.centroids.copy_(torch.where(finite, centroids, self.centroids))
        self.counts.copy_(torch.where(finite, counts, self.counts))
        self.refused.note(finite.logical_not())

    def _fill(self, x: Tensor, finite: int) -> Tensor:
        """Take the missing centroids from the front of x and return the rest. Only here is a value read back to the
        host, and only until the centroids are complete: a centroid must never start as NaN."""
        if not finite:
            self.refused.note(torch.ones((), dtype=torch.bool, device=x.device))
            return x[:0]
        taken = min(self.num_centroids - self._filled, len(x))
        self.centroids[self._filled : self._filled + taken] = x[:taken]
        self.counts[self._filled : self._filled + taken] = 1
        self._filled += taken
        return x[taken:]

    def _check(self, x: Tensor) -> None:
        if x.ndim != 2 or x.shape[1] != self.dim:
            raise ValueError(f"expected representations of shape (samples, {self.dim}), got {tuple(x.shape)}")

    def _save_to_state_dict(self, *args: Any) -> None:
        self.settle()
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._filled = int((self.counts > 0).sum())

    def extra_repr(self) -> str:
        return (
            f"num_centroids={self.num_centroids}, dim={self.dim}, bandwidth={self.bandwidth!r}, "
            f"update_rule={self.update_rule!r}, kernel_weights={self.kernel_weights}, beta={self.beta}"
        )
