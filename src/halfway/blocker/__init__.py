"""The line that users add: `ForwardBlocker`, and what it says when something cannot work or is forgotten.

Begin with `blocker`. It uses the engine, a selector and the batch; integrations and the lab use it.
"""

from __future__ import annotations

from .blocker import ForwardBlocker

__all__ = ["ForwardBlocker"]
