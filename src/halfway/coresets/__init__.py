"""Coresets: a subset is chosen once, before training. A new method is a file in `scores` or `greedy` and a line here.

Begin with `base`, which defines what a method is; `evidence` is what it chooses from, `measure` gets that from a model,
`coreset` is what comes out.
"""

from __future__ import annotations

from typing import Any

from ..errors import did_you_mean
from .base import Greedy, Method, Picked, Scored
from .choosing import choose
from .coreset import Coreset
from .dynamics import Dynamics
from .evidence import Checkpoint, Evidence, ShortRun
from .scores.random import RandomCoreset

METHODS: dict[str, type[Method]] = {method.name: method for method in (RandomCoreset,)}


def make(name: str, **settings: Any) -> Method:
    """A method from its name; settings are those of its class."""
    if name not in METHODS:
        raise ValueError(f"unknown coreset method {name!r}; {did_you_mean(name, METHODS)}")
    return METHODS[name](**settings)


__all__ = [
    "METHODS",
    "Checkpoint",
    "Coreset",
    "Dynamics",
    "Evidence",
    "Greedy",
    "Method",
    "Picked",
    "RandomCoreset",
    "Scored",
    "ShortRun",
    "choose",
    "make",
]
