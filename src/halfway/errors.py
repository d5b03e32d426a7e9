"""Error classes, and error messages that several rooms use. Imports nothing from halfway."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ReplayError(RuntimeError):
    """A replay was wrong, or was demanded (`reuse="replay"`) and is not possible."""


def not_finite(layer_name: str) -> str:
    """The message for features that are NaN or infinite."""
    return (
        f"the features of layer {layer_name!r} contain values that are not finite (NaN or infinite). Such steps prune "
        "at random and teach the selector nothing; the training itself has probably diverged: lower the learning rate, "
        "clip gradients, or check the inputs"
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: what is close to it, or all there is."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names) or 'none'}"
