"""Containers: what they hold at a moment, whether that has changed, and putting it back."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from operator import is_
from typing import Any

CONTAINERS = (dict, list, set, deque, bytearray)


def identical(a: Any, b: Any) -> bool:
    """Whether two sequences hold the same objects."""
    return len(a) == len(b) and all(map(is_, a, b))


def is_array(value: Any) -> bool:
    """Whether it is NumPy's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.ndim > 0


def copied(container: Any) -> Any:
    """What it holds now."""
    if isinstance(container, dict):
        return dict(container)
    if isinstance(container, (list, deque)):
        return list(container)
    if isinstance(container, bytearray):
        return bytes(container)
    return set(container) if isinstance(container, set) else container.copy()


def differs(container: Any, copy: Any) -> bool:
    """Whether it holds something else than when it was copied."""
    if isinstance(container, dict):
        return not (identical(container.values(), copy.values()) and identical(container, copy))
    if isinstance(container, (list, deque)):
        return not identical(container, copy)
    return container != copy if isinstance(container, (set, bytearray)) else container.tobytes() != copy.tobytes()


def refill(container: Any, copy: Any) -> None:
    """Put back what it held, by the methods of the built-in types: a subclass may do more."""
    if isinstance(container, OrderedDict):
        OrderedDict.clear(container)
        for key, value in copy.items():
            OrderedDict.__setitem__(container, key, value)
    elif isinstance(container, dict):
        dict.clear(container)
        dict.update(container, copy)
    elif isinstance(container, (list, bytearray)):
        container[:] = copy
    elif isinstance(container, deque):
        container.clear()
        container.extend(copy)
    elif isinstance(container, set):
        container.clear()
        container.update(copy)
    else:
        container[...] = copy
