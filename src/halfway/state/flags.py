"""Errors found on the device: noted there during the step, read when the host waits anyway."""

from __future__ import annotations

from torch import Tensor


class StickyFlag:
    """Remembers that something was true in at least one step, without making the host wait for it."""

    def __init__(self) -> None:
        self._noted: Tensor | None = None

    def note(self, found: Tensor) -> None:
        """Note a () bool on any device."""
        self._noted = found if self._noted is None else self._noted.to(found.device) | found

    def take(self) -> bool:
        """Whether anything true was noted since the last call. Waits for the device."""
        noted, self._noted = self._noted, None
        return noted is not None and bool(noted)
