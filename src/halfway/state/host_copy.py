"""Values on their way from the device to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor on the host. The device is waited for when it is looked at, not before."""

    def __init__(self, t: Tensor) -> None:
        t = t.detach()
        self._event: Any = None
        if t.device.type == "cpu":
            self._copy = t.clone()  # the original may be overwritten before the copy is looked at
            return
        self._copy = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True).copy_(t, non_blocking=True)
        there = torch.get_device_module(t.device)
        self._event = there.Event()
        self._event.record(there.current_stream(t.device))

    def value(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._copy
