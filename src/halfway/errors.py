"""Error classes, and error messages that several rooms use. Imports nothing from halfway."""

from __future__ import annotations


class ReplayError(RuntimeError):
    """A replay was wrong, or was demanded (`reuse="replay"`) and is not possible."""


def not_finite(layer_name: str) -> str:
    """The message for features that are NaN or infinite."""
    return (
        f"the features of layer {layer_name!r} contain values that are not finite (NaN or infinite). Such steps prune "
        "at random and teach the selector nothing; the training itself has probably diverged: lower the learning rate, "
        "clip gradients, or check the inputs"
    )
