"""What is known about each sample of the data set, by its id: a last loss, last features, how long it has waited.

One tensor with a row per sample. What one rank writes reaches all ranks (one small sum per write), so the memory is the
same everywhere, and any rank may get any sample in the next epoch.

Shape suffixes: N samples of the data set, B of a batch, W values per sample, R ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..settings import plain_settings
from .flags import StickyFlag
from .host_copy import HostCopy
from .ranks import ALONE, PendingSum, Ranks

# A memory does not grow beyond this many samples: larger ids are hashes, not positions.
_MOST = 2**31


class SampleMemory:
    """W numbers per sample.

    Args:
        width: W.
        num_samples: N, ids are 0..N-1. None lets the memory grow with the ids it meets; on an accelerator that costs a
            wait for the device at every step if the ids are there too, or if several ranks write. So pass N.
        unknown: the value of samples that have not been written yet.
    """

    @plain_settings
    def __init__(self, width: int = 1, num_samples: int | None = None, unknown: float = float("nan")) -> None:
        if width < 1 or (num_samples is not None and num_samples < 1):
            raise ValueError(f"width and num_samples must be at least 1, got width={width}, num_samples={num_samples}")
        self.width = width
        self.num_samples = num_samples
        self.unknown = unknown
        self._values_NW = torch.full((num_samples or 0, width), unknown, device="cpu", dtype=torch.float32)
        self._pending: PendingSum | None = None
        # Rows of a message, for each rank; what had no room; and what room the ranks have asked for in the last two.
        self._room = 0
        self._late = self._nothing()
        self._asked: list[HostCopy] = []
        self._refused = StickyFlag()

    def __len__(self) -> int:
        return len(self._values_NW)

    @property
    def values(self) -> Tensor:
        """(N, W): all rows, including what other ranks have sent."""
        self.settle()
        return self._values_NW

    def read(self, ids: Tensor, device: torch.device | None = None) -> Tensor:
        """The rows (B, W) of `ids` (B,), on `device` (default: the device of the ids)."""
        self.settle()
        device = device or ids.device
        ids = _int64(ids)
        if self._values_NW.device != device:
            self._values_NW = self._values_NW.to(device)
        if self.num_samples is not None:
            return self._values_NW.index_select(0, self._rows(ids))
        # Reading does not grow the memory: ranks read different ids, and their memories must keep the same size.
        if not len(self):
            return self._values_NW.new_full((len(ids), self.width), self.unknown)
        beyond_B1 = (ids >= len(self)).to(device, non_blocking=True).unsqueeze(1)
        known = self._values_NW.index_select(0, self._rows(ids.clamp_max(len(self) - 1)))
        return torch.where(beyond_B1, self.unknown, known)

    def write(
        self, ids: Tensor, values: Tensor, ranks: Ranks = ALONE, batch_size: int = 0, among: Tensor | None = None
    ) -> None:
        """Replace the rows of `ids` (B,) by `values` (B, W) or (B,), on all ranks; each must call this equally often.

        If an id occurs twice, the later row counts; if on two ranks, that of the higher rank. Values that are not
        finite are written as unknown. With several ranks only the first call waits for the others; after that
        `settle` waits when the memory is needed.

        Messages between ranks have room for a quarter more than the largest first batch of any rank. What does not fit
        comes with the next ones, which soon have room for it: every message says what its rank would need. A row that
        waited may replace a newer one of another rank, and rows that still wait are no part of a state: a run that is
        resumed at this moment has forgotten them.

        Args:
            batch_size: the size of the batch the ids were chosen from.
            among: ids that `ids` were taken from. If they are on the CPU, a single rank's memory grows by these, for
                which no device is waited.
        """
        self.settle()
        ids = _int64(ids)
        values = values.detach().reshape(len(ids), self.width).to(torch.float32)
        values = torch.where(values.isfinite(), values, self.unknown)
        if self._values_NW.device != values.device:
            self._values_NW = self._values_NW.to(values.device)
        if ranks.size == 1:
            self._hold(among if among is not None and _on_host(among) else ids)
            if len(ids):
                self._put(self._rows(ids), values)
            return
        # float64 is exact for ids and values alike.
        new = torch.cat([ids.to(values.device, torch.float64).unsqueeze(1), values.to(torch.float64)], 1)
        rows = torch.cat([self._late.to(values.device), new])
        self._make_room(max(len(rows), batch_size), ranks, values.device)
        sent, self._late = rows.split([min(len(rows), self._room), max(0, len(rows) - self._room)])
        # The first row says what room this rank needs, the first column marks the others that are in use.
        offer = values.new_zeros(ranks.size, 1 + self._room, self.width + 2, dtype=torch.float64)
        offer[ranks.rank, 0, 0] = len(rows)
        offer[ranks.rank, 1 : 1 + len(sent), 0] = 1
        offer[ranks.rank, 1 : 1 + len(sent), 1:] = sent
        self._pending = ranks.sum(offer, self)

    def send_nothing(self, ranks: Ranks) -> None:
        """Called instead of `write` on a rank that has no batches left."""
        self.write(torch.zeros(0, dtype=torch.int64, device="cpu"), self._values_NW[:0], ranks)

    def _make_room(self, size: int, ranks: Ranks, device: torch.device) -> None:
        """The same on all ranks, so it goes by what they have told each other."""
        if not self._room:
            sizes = torch.zeros(ranks.size, dtype=torch.int64, device=device)
            sizes[ranks.rank] = size
            self._room = _with_slack(int(ranks.sum(sizes).wait().max()))
        if len(self._asked) > 1:  # by the message before the last, which has reached the host by now
            wanted = int(self._asked.pop(0).value())
            self._room = self._room if wanted <= self._room else _with_slack(wanted)

    def _nothing(self) -> Tensor:
        return torch.zeros(0, 1 + self.width, dtype=torch.float64, device="cpu")

    def settle(self) -> None:
        """Wait for what the ranks have sent each other, and store it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        messages = pending.wait()
        self._asked.append(HostCopy(messages[:, 0, 0].amax()))
        rows = messages[:, 1:].flatten(0, 1)
        # So that no shape depends on data, unused rows repeat the last one in use (any other might be out of date). If
        # none is in use, they write what is there already.
        used, ids = rows[:, 0] == 1, rows[:, 1].to(torch.int64)
        position = torch.arange(len(rows), device=rows.device)
        place = torch.where(used, position, torch.where(used, position, 0).argmax())
        ids, values = ids[place], rows[place, 2:].to(torch.float32)
        self._hold(ids)
        known = self._rows(ids)
        self._put(known, torch.where(used.any(), values, self._values_NW.index_select(0, known)))

    def _put(self, rows: Tensor, values: Tensor) -> None:
        # If an id occurs twice, all its rows write the value of the last one: a scatter has no order on a GPU.
        sorted_rows, order = rows.sort(stable=True)
        last = order[torch.searchsorted(sorted_rows, rows, right=True) - 1]
        self._values_NW.index_copy_(0, rows, values.index_select(0, last))

    def _rows(self, ids: Tensor) -> Tensor:
        """The ids as row numbers on the memory's device."""
        ids = _int64(ids)
        outside = (ids < 0) | (ids >= len(self._values_NW))
        if _on_host(ids):
            if outside.any():
                raise ValueError(self._range_error(int(ids[outside][0])))
        else:  # reported by `check`, so that nothing waits for the device here
            self._refused.note(outside.any())
            ids = ids.clamp(0, len(self._values_NW) - 1)
        return ids.to(self._values_NW.device, non_blocking=True)

    def check(self) -> None:
        """Raise if an id on the device was out of range. May wait for the device."""
        self.settle()
        if self._refused.take():
            raise ValueError(self._range_error(None))

    def _range_error(self, id: int | None) -> str:
        found = "an id out of range" if id is None else f"the id {id}"
        last = f"to {self.num_samples - 1} (num_samples - 1)" if self.num_samples is not None else "on"
        return (
            f"there is {found}: ids must be whole numbers from 0 {last}, the sample's position in the data set "
            "(`halfway.WithIds` yields it)"
        )

    def _hold(self, ids: Tensor) -> None:
        """Grow to hold these ids, if the memory may. Waits for the device that they are on."""
        if self.num_samples is not None or not len(ids):
            return
        size = int(ids.max()) + 1
        if size > _MOST:
            raise ValueError(self._range_error(size - 1))
        missing = size - len(self._values_NW)
        if missing > 0:
            more = max(missing, len(self._values_NW))
            self._values_NW = torch.cat([self._values_NW, self._values_NW.new_full((more, self.width), self.unknown)])

    def state_dict(self) -> dict[str, Any]:
        """{"values": one tensor}, the same on all ranks."""
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values_NW = self.checked(state)
        self._pending, self._late, self._asked = None, self._nothing(), []

    def checked(self, state: dict[str, Any]) -> Tensor:
        """The values (N, W) float32 in a state; an error if it does not fit this memory."""
        values = state.get("values") if isinstance(state, dict) else None
        if not isinstance(values, Tensor) or values.ndim != 2 or values.shape[1] != self.width:
            raise ValueError(f"a sample memory's state is a tensor 'values' of {self.width} numbers per sample")
        if self.num_samples not in (None, len(values)):
            raise ValueError(f"the state remembers {len(values)} samples, here are {self.num_samples}")
        return values.to(torch.float32, copy=True)


def _with_slack(size: int) -> int:
    return size + size // 4 + 8


def _on_host(ids: Tensor) -> bool:
    return ids.device.type == "cpu"


def _int64(ids: Tensor) -> Tensor:
    """Whole numbers; a narrow type could not be compared with the size of a memory."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"ids must be whole numbers (torch.int64), the samples' positions, not {ids.dtype}")
    return ids.to(torch.int64)
