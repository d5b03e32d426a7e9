"""One epoch of a batch sampler: the order of the samples, and who of each batch was retained so far.

Everything is a tensor that is filled in place, so that a state can hold it at every batch for nothing; a new epoch has
new ones, and a state that was taken before stays as it was.

Shape suffixes: N samples of the epoch on this rank, K batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Epoch:
    """The order, cut into batches of `offered` samples, and the choices.

    Args:
        number: which epoch.
        order: (N,) int64, the samples' ids.
        offered: samples per batch before pruning.
        drop_last: whether an incomplete last batch is left out.
    """

    def __init__(self, number: int, order: Tensor, offered: int, drop_last: bool) -> None:
        self.number = number
        self.order = order
        self._offered = offered
        self.batches = len(order) // offered if drop_last else -(-len(order) // offered)
        self._retained_N = torch.zeros(len(order), dtype=torch.bool, device="cpu")
        self._weights_N = torch.ones(len(order), dtype=torch.float32, device="cpu")
        self._drawn = torch.zeros((), dtype=torch.int64, device="cpu")

    @property
    def drawn(self) -> int:
        """Batches that were decided."""
        return int(self._drawn)

    def batch(self, k: int) -> Tensor:
        """(B,) ids of batch k, before pruning."""
        return self.order[k * self._offered : (k + 1) * self._offered]

    def decide(self, retained: Tensor | None, weights: Tensor | None) -> None:
        """The choice for the next batch: its retained rows (S,), all of them if None, and their weights (S,)."""
        first = self.drawn * self._offered
        rows = torch.arange(len(self.batch(self.drawn)), device="cpu") if retained is None else retained.cpu()
        self._retained_N[first + rows] = True
        if weights is not None:
            self._weights_N[first + rows] = weights.to("cpu", torch.float32)
        self._drawn += 1

    def retained(self, k: int) -> tuple[list[int], list[float]]:
        """The ids of batch k that stay, and their weights."""
        part = slice(k * self._offered, (k + 1) * self._offered)
        stays = self._retained_N[part]
        return self.order[part][stays].tolist(), self._weights_N[part][stays].tolist()

    def weights(self, ids: Tensor) -> Tensor:
        """(B,) ids to (B,) weights: what was decided in this epoch, 1 where nothing was."""
        if bool((self._weights_N == 1).all()):  # as for most selectors
            return torch.ones(len(ids), device="cpu")
        known_M, at_M = self.order[self._retained_N].sort(stable=True)
        # Where a sample was drawn twice, the last of its weights.
        rows_B = torch.searchsorted(known_M, ids.to(torch.int64), right=True).sub_(1).clamp_min_(0)
        weights_B = self._weights_N[self._retained_N][at_M[rows_B]]
        return torch.where(known_M[rows_B] == ids, weights_B, 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "order": self.order,
            "retained": self._retained_N,
            "weights": self._weights_N,
            "drawn": self._drawn,
        }

    @classmethod
    def from_state(cls, state: Any, offered: int, drop_last: bool) -> Epoch:
        """The inverse of `state_dict`."""
        if not isinstance(state, dict) or set(state) != {"number", "order", "retained", "weights", "drawn"}:
            raise ValueError("the state's epoch must have 'number', 'order', 'retained', 'weights' and 'drawn'")
        shapes = [tuple(state[key].shape) for key in ("order", "retained", "weights", "drawn")]
        if len(set(shapes[:3])) > 1 or len(shapes[0]) != 1 or shapes[3] != ():
            raise ValueError(f"the state's epoch has tensors of shapes {shapes}, which do not belong together")
        epoch = cls(int(state["number"]), state["order"].to("cpu", torch.int64, copy=True), offered, drop_last)
        epoch._retained_N = state["retained"].to("cpu", torch.bool, copy=True)
        epoch._weights_N = state["weights"].to("cpu", torch.float32, copy=True)
        epoch._drawn = state["drawn"].to("cpu", torch.int64, copy=True)
        return epoch
