"""What is known about each sample of the data set, by its id: a last loss, last features, how long it has waited.

One tensor with a row per sample. What one rank writes arrives on all of them (one small sum per write), so that the
memory is the same everywhere and any rank may meet any sample in the next epoch.

Shape suffixes: N samples of the data set, B of a batch, W values per sample, R ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .ranks import ALONE, Arriving, Ranks


class SampleMemory:
    """W numbers per sample.

    Args:
        width: W.
        num_samples: N, ids are 0..N-1. None lets the memory grow with the ids it meets; ids on an accelerator then
            cost a wait for the device at every step, so pass ids on the CPU, or N.
        unknown: what stands for a sample nobody has written yet.
    """

    def __init__(self, width: int = 1, num_samples: int | None = None, unknown: float = float("nan")) -> None:
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        self.width = width
        self.num_samples = num_samples
        self.unknown = unknown
        self._values_NW = torch.full((num_samples or 0, width), unknown)
        self._arriving: Arriving | None = None
        self._room = 0
        self._refused: Tensor | None = None

    def __len__(self) -> int:
        return len(self._values_NW)

    @property
    def values(self) -> Tensor:
        """(N, W): everything, with what has arrived so far."""
        self.settle()
        return self._values_NW

    def read(self, ids: Tensor, device: torch.device | None = None) -> Tensor:
        """(B,) ids to (B, W), on `device` (that of the ids, if it is not said)."""
        self.settle()
        device = device or ids.device
        if self._values_NW.device != device:
            self._values_NW = self._values_NW.to(device)
        return self._values_NW.index_select(0, self._rows(ids))

    def write(self, ids: Tensor, values: Tensor, ranks: Ranks = ALONE, batch_size: int = 0) -> None:
        """Replace the rows of `ids` (B,) by `values` (B, W) or (B,), on all ranks; each must call this equally often.

        Of an id that occurs twice the later row counts, and of two ranks the higher one. What is not finite is written
        as unknown. With several ranks nobody waits now; `settle` does, when the memory is needed.

        Args:
            batch_size: the size of the batch the ids were chosen from, where ranks may have batches of different sizes:
                messages must have the same size everywhere.
        """
        self.settle()
        values = values.detach().reshape(len(ids), self.width).to(torch.float32)
        values = torch.where(values.isfinite(), values, self.unknown)
        if self._values_NW.device != values.device:
            self._values_NW = self._values_NW.to(values.device)
        if ranks.size == 1:
            if len(ids):
                self._put(self._rows(ids), values)
            return
        self._room = max(self._room, len(ids), batch_size)
        # float64: exact for ids and values alike. The first column marks the rows that are in use.
        offer = values.new_zeros(ranks.size, self._room, self.width + 2, dtype=torch.float64)
        offer[ranks.rank, : len(ids), 0] = 1
        offer[ranks.rank, : len(ids), 1] = ids.to(offer)
        offer[ranks.rank, : len(ids), 2:] = values.to(offer)
        self._arriving = ranks.sum(offer)

    def write_nothing(self, ranks: Ranks) -> None:
        """Takes the place of `write` on a rank that has no batches left."""
        if ranks.size > 1 and self._room:
            self.write(torch.zeros(0, dtype=torch.int64), self._values_NW[:0], ranks)

    def settle(self) -> None:
        """Wait for what the ranks have sent each other, and take it over."""
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            return
        rows = arriving.wait().flatten(0, 1)
        # Unused rows write what is there already, to the first row in use: no shape depends on data.
        used, ids = rows[:, 0] == 1, rows[:, 1].to(torch.int64)
        first = used.to(torch.int8).argmax()
        place = torch.where(used, torch.arange(len(rows), device=rows.device), first)
        ids, values = ids[place], rows[place, 2:].to(torch.float32)
        known = self._rows(ids)
        self._put(known, torch.where(used.any(), values, self._values_NW.index_select(0, known)))

    def _put(self, rows: Tensor, values: Tensor) -> None:
        # Where an id occurs twice all its rows write the value of the last: a scatter has no order on a GPU.
        sorted_rows, order = rows.sort(stable=True)
        last = order[torch.searchsorted(sorted_rows, rows, right=True) - 1]
        self._values_NW.index_copy_(0, rows, values.index_select(0, last))

    def _rows(self, ids: Tensor) -> Tensor:
        """The ids as row numbers on the memory's device; the memory grows if it may."""
        if self.num_samples is None and len(ids):
            self._grow(int(ids.max()) + 1)
        outside = (ids < 0) | (ids >= len(self._values_NW))
        if ids.device.type == "cpu":
            if outside.any():
                raise ValueError(self._range_error(int(ids[outside][0])))
        else:  # reported by `check`, so that nothing waits for the device here
            self._refused = outside.any() if self._refused is None else self._refused | outside.any()
            ids = ids.clamp(0, len(self._values_NW) - 1)
        return ids.to(self._values_NW.device, torch.int64, non_blocking=True)

    def check(self) -> None:
        """Raise if an id on the device was out of range. May wait for the device."""
        self.settle()
        refused, self._refused = self._refused, None
        if refused is not None and refused:
            raise ValueError(self._range_error(None))

    def _range_error(self, id: int | None) -> str:
        found = "an id out of range" if id is None else f"the id {id}"
        return (
            f"there is {found}: ids must be whole numbers from 0 to {len(self._values_NW) - 1} (num_samples - 1), the "
            "sample's position in the data set (`halfway.WithIds` yields it)"
        )

    def _grow(self, size: int) -> None:
        missing = size - len(self._values_NW)
        if missing > 0:
            more = max(missing, len(self._values_NW))
            self._values_NW = torch.cat([self._values_NW, self._values_NW.new_full((more, self.width), self.unknown)])

    def state_dict(self) -> dict[str, Any]:
        """One tensor, the same on all ranks."""
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        values = state.get("values") if isinstance(state, dict) else None
        if not isinstance(values, Tensor) or values.ndim != 2 or values.shape[1] != self.width:
            raise ValueError(f"a sample memory's state is a tensor 'values' of {self.width} numbers per sample")
        if self.num_samples not in (None, len(values)):
            raise ValueError(f"the state remembers {len(values)} samples, here are {self.num_samples}")
        self._values_NW = values.clone()
