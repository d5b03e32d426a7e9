"""What the integrations log by themselves."""

from __future__ import annotations

from ..blocker.blocker import ForwardBlocker

_LOGGED = ("effective_ratio", "relative_flops", "steps_replayed", "steps_recomputed")


def logged(blocker: ForwardBlocker) -> dict[str, float]:
    """Ratio, cost, and numbers of replayed and recomputed steps, as "halfway/...". Waits for the device."""
    numbers = blocker.stats.as_dict()
    return {f"halfway/{name}": numbers[name] for name in _LOGGED}
