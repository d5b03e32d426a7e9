"""The state of autocast in which a model is called, and therefore probed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class AutocastState(NamedTuple):
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> AutocastState:
        return cls(torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))


class Autocast:
    """What autocast was in the model's last training call: the next one is expected to be like it.

    Attributes:
        last: None before the first call.
    """

    def __init__(self) -> None:
        self.last: AutocastState | None = None

    def expected(self, device: torch.device) -> AutocastState:
        """In the next call; before the first, what it is now."""
        return self.last or AutocastState.now(device)

    def called(self, device: torch.device) -> None:
        """The model's training call begins."""
        self.last = AutocastState.now(device)

    def as_text(self) -> str:
        """For a checkpoint: "on bfloat16", or "" if nothing is known yet."""
        return "" if self.last is None else f"{'on' if self.last.enabled else 'off'} {str(self.last.dtype)[6:]}"

    def load(self, state: AutocastState | None) -> None:
        self.last = state


def autocast_from_text(text: Any) -> AutocastState | None:
    """The inverse of `Autocast.as_text`."""
    if text == "":
        return None
    state, _, name = str(text).partition(" ")
    dtype = getattr(torch, name, None) if name else None
    if state not in ("on", "off") or not isinstance(dtype, torch.dtype):
        raise ValueError(f"this is not the state_dict of a ForwardBlocker: its autocast is {text!r}")
    return AutocastState(state == "on", dtype)
