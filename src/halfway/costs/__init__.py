"""What a cut saves, before anything is trained: `cost` of one, `layers` to choose among all."""

from __future__ import annotations

from .cost import cost
from .layers import layers

__all__ = ["cost", "layers"]
