"""Everything that modules hold, as far as it can be looked into: for an audit of what a forward pass changes."""

from __future__ import annotations

import io
import pickle
from collections import deque
from types import GeneratorType
from typing import Any, NamedTuple

from torch import Tensor, nn

from .containers import CONTAINERS, is_array

# Objects of these packages keep state that cannot be read or set from outside, but that shows when they are pickled.
_COUNTING = frozenset({"itertools", "random", "numpy", "array"})
# A walk goes so deep, looks at so many containers, and into those of at most so many entries.
_DEPTH, _MANY, _LONG = 5, 20_000, 1_000
_PICKLED = 1 << 16


class Found(NamedTuple):
    """A container, and the attribute it was found in."""

    owner: Any
    name: str
    container: Any


class Walk:
    """Goes through what modules hold: containers, and objects of the model's own package.

    Attributes:
        found: the containers.
        opaque: objects that cannot be looked into, with their path and what they show of themselves.
    """

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self.found: list[Found] = []
        self.opaque: list[tuple[str, Any, bytes]] = []
        self._names = names
        self._seen: set[int] = set()

    def through(self, owner: Any, name: str, value: Any) -> None:
        """Walk through one attribute of a module (or a parameter)."""
        package = type(owner).__module__.partition(".")[0]
        module = self._names.get(owner, "") if isinstance(owner, nn.Module) else type(owner).__name__
        waiting: list[tuple[str, Any, int]] = [(f"{module or type(owner).__name__}.{name}", value, 0)]
        while waiting and len(self.found) < _MANY:
            path, value, depth = waiting.pop()
            if id(value) in self._seen or isinstance(value, (Tensor, type, str)) or value is None:
                continue
            self._seen.add(id(value))
            if isinstance(value, tuple):
                waiting += [(f"{path}[{i}]", v, depth + 1) for i, v in enumerate(value[:_LONG])]
            elif isinstance(value, CONTAINERS) or is_array(value):
                self.found.append(Found(owner, name, value))
                if depth < _DEPTH and len(value) <= _LONG:
                    waiting += [(p, v, depth + 1) for p, v in _entries(path, value)]
            elif isinstance(value, nn.Module):
                if value not in self._names:  # those are walked through by themselves
                    waiting.append((path, vars(value), depth + 1))
            else:
                home = type(value).__module__.partition(".")[0]
                own = home in (package, "types") and not callable(value)
                if own and hasattr(value, "__dict__"):
                    waiting.append((path, vars(value), depth + 1))
                elif own or home in _COUNTING or hasattr(value, "__next__"):
                    self.opaque.append((path, value, shown(value)))


def _entries(path: str, container: Any) -> list[tuple[str, Any]]:
    if isinstance(container, dict):
        return [(f"{path}[{k!r}]", v) for k, v in container.items()]
    return [(f"{path}[{i}]", v) for i, v in enumerate(container)] if isinstance(container, (list, set, deque)) else []


class _Bounded(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() > _PICKLED:
            raise OverflowError
        return super().write(data)


def shown(value: Any) -> bytes:
    """What an object shows of its state when it is pickled; a generator, which cannot be, by its frame."""
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        return b"" if frame is None else b"%d" % frame.f_lasti + shown(list(frame.f_locals.values()))
    into = _Bounded()
    try:
        pickle.Pickler(into, protocol=4).dump(value)
    except Exception:  # whatever somebody's __reduce__ raises: such an object cannot be watched
        return b""
    return into.getvalue()
