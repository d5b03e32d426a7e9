"""What a cut saves, before anything is trained: `cost` of one, `layers` to choose among all.

Begin with `cost`. Uses the engine to count FLOPs in a pass that leaves no trace; the blocker does not use it.
"""

from __future__ import annotations

from .cost import cost
from .layers import layers

__all__ = ["cost", "layers"]
