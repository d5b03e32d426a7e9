"""Sentences that more than one room says when something is wrong. Imports nothing of halfway."""

from __future__ import annotations


def not_finite(layer_name: str) -> str:
    """The message about features that are NaN or infinite."""
    return (
        f"the features of layer {layer_name!r} contain values that are not finite (NaN or infinite). Such steps prune "
        "at random and teach the selector nothing; the training itself has probably diverged: lower the learning rate, "
        "clip gradients, or check the inputs"
    )
