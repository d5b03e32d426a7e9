"""What a forward pass changes outside of tensors, and putting it back: attributes, containers, hooks, submodules.

Models keep counters, lists of auxiliary losses and caches, register hooks and build layers when they first run, and
replace the data of parameters (`p.data = ...`, which no operation shows). All of it is Python state in containers: the
attributes of a module are a dict, so are its hooks, parameters and submodules. A container is put back as a whole, so
that a flag and what it stands for ("hooks are installed") cannot come apart.

In every step the attributes of all modules are looked at, and the containers among those of the modules before the
cut. What else a pass changes (a list in a list, the attributes of an object that a module holds) is found by an
*audit*, which walks through everything; it is made on the first batch, and whenever the program is a new one.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .sharding import local, sharded

_CONTAINERS = (dict, list, set, deque)
# Objects of these packages keep state that cannot be read or set from outside, but that shows when they are pickled.
_COUNTING = frozenset({"itertools", "random", "numpy", "array"})
# An audit goes so deep, looks at so many containers, and into those of at most so many entries.
_DEPTH, _MANY, _LONG = 5, 20_000, 1_000
_PICKLED = 1 << 16
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Footprint:
    """The state of a model outside of its tensors.

    Attributes:
        modules: all modules of the model.
        entered: those that run before the cut; all, until `enter` says which.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._known: list[tuple[nn.Module, list[Any]]] = []
        self._changing: list[Any] = []
        self._names: dict[nn.Module, str] = {}
        self.modules: list[nn.Module] = []
        self.entered: list[nn.Module] = []
        self._holds_data = True
        self.refresh()

    def refresh(self) -> bool:
        """List the modules again if some have come or gone; returns whether they have."""
        if self._known and all(_same_values(m._modules, children) for m, children in self._known):
            return False
        self.modules = list(self._root.modules())
        self._known = [(m, list(m._modules.values())) for m in self.modules]
        self._names = {m: n for n, m in self._root.named_modules()}
        self.entered = self.modules
        # FSDP2 exchanges parameters by itself, at its own times.
        self._holds_data = not sharded(self._root)
        return True

    def name(self, module: nn.Module) -> str | None:
        """Its name in the model; None for one that is not in it."""
        return self._names.get(module)

    def enter(self, modules: set[nn.Module]) -> None:
        """These run before the cut."""
        self.entered = [m for m in self.modules if m in modules]

    def tensors(self) -> list[Tensor]:
        """All parameters and buffers."""
        owned = [d for m in self.modules for d in (m._parameters, m._buffers) if d]
        return [t for d in owned for t in d.values() if t is not None]

    def save(self) -> Saved:
        """Everything as it is now."""
        self.refresh()
        containers: list[Any] = [vars(m) for m in self.modules]
        for module in self.entered:
            containers += [v for v in vars(module).values() if isinstance(v, _CONTAINERS)]
        containers += [m._modules for m, children in self._known if children]
        return Saved(self, containers + self._changing, self.tensors() if self._holds_data else [])

    @contextlib.contextmanager
    def kept(self, audited: bool = False) -> Iterator[None]:
        """Whatever happens in here is taken back. If `audited`, everything that the model holds is looked at."""
        saved = self.save()
        walk = _walk(self.modules, self._names) if audited else _Walk([], [])
        contents = [(container, _copy(container)) for container in walk.containers]
        try:
            yield
        finally:
            changed = [(container, copy) for container, copy in contents if _changed(container, copy)]
            for container, copy in changed:
                _put_back(container, copy)
            saved.restore()
            known = {id(container) for container in self._changing}
            self._changing += [container for container, _ in changed if id(container) not in known]
        for path, found, pickled in walk.opaque:
            if _pickled(found) != pickled:
                raise TypeError(
                    f"{path} is a {type(found).__name__} that the forward pass changes and that halfway cannot put "
                    "back, so it would change more than once per step; draw from the global generators instead, count "
                    "in a plain attribute or a buffer, or do it outside of forward"
                )


class Saved:
    """The containers and the data of parameters at one moment."""

    def __init__(self, footprint: Footprint, containers: Iterable[Any], tensors: list[Tensor]) -> None:
        self._footprint = footprint
        self._contents: list[tuple[Any, Any]] = []
        self._empty: list[Any] = []
        for container in containers:
            if len(container):
                self._contents.append((container, _copy(container)))
            else:
                self._empty.append(container)
        self._data = [(t, t.detach()) for t in tensors]
        self._next_hook = RemovableHandle.next_id

    def restore(self) -> None:
        for container, copy in self._contents:
            if _changed(container, copy):
                _put_back(container, copy)
        for container in self._empty:
            if container:
                container.clear()
        for t, before in self._data:
            if local(t).data_ptr() != local(before).data_ptr() or t.shape != before.shape:
                t.data = before
        if RemovableHandle.next_id != self._next_hook:
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        """Those registered since: on modules behind the cut, whose containers were not saved."""
        for module in self._footprint.modules:
            for name in _HOOKS:
                hooks = getattr(module, name)
                for key in [k for k in hooks if k >= self._next_hook]:
                    del hooks[key]


class _Walk(NamedTuple):
    """containers: all that were found. opaque: objects that can only be pickled, with path and pickle."""

    containers: list[Any]
    opaque: list[tuple[str, Any, bytes]]


def _walk(modules: list[nn.Module], names: dict[nn.Module, str]) -> _Walk:
    """Everything that modules hold: containers, and objects of the model's own package."""
    found = _Walk([], [])
    seen: set[int] = set()
    for module in modules:
        package = type(module).__module__.partition(".")[0]
        name = names.get(module, "")
        waiting: list[tuple[str, Any, int]] = [(name or type(module).__name__, vars(module), 0)]
        while waiting and len(found.containers) < _MANY:
            path, value, depth = waiting.pop()
            if id(value) in seen or isinstance(value, (Tensor, nn.Module, type, str)):
                continue
            seen.add(id(value))
            if isinstance(value, tuple):
                waiting += [(f"{path}[{i}]", v, depth + 1) for i, v in enumerate(value[:_LONG])]
            elif isinstance(value, _CONTAINERS) or _is_array(value):
                found.containers.append(value)
                if depth < _DEPTH and len(value) <= _LONG and not _is_array(value):
                    waiting += [(p, v, depth + 1) for p, v in _entries(path, value, depth)]
            else:
                home = type(value).__module__.partition(".")[0]
                if home in _COUNTING:
                    found.opaque.append((path, value, _pickled(value)))
                elif home in (package, "types") and hasattr(value, "__dict__") and not callable(value):
                    waiting.append((path, vars(value), depth + 1))
    return found


def _entries(path: str, container: Any, depth: int) -> list[tuple[str, Any]]:
    if isinstance(container, dict):
        return [(f"{path}.{k}" if depth == 0 else f"{path}[{k!r}]", v) for k, v in container.items()]
    return [(f"{path}[{i}]", v) for i, v in enumerate(container)]


class _Bounded(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() > _PICKLED:
            raise OverflowError
        return super().write(data)


def _pickled(value: Any) -> bytes:
    into = _Bounded()
    try:
        pickle.Pickler(into, protocol=4).dump(value)
    except Exception:  # whatever somebody's __reduce__ raises: such an object cannot be watched
        return b""
    return into.getvalue()


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.ndim > 0


def _same_values(mapping: dict[str, Any], values: list[Any]) -> bool:
    return len(mapping) == len(values) and all(map(is_, mapping.values(), values))


def _copy(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    if isinstance(container, (list, deque)):
        return list(container)
    return set(container) if isinstance(container, set) else container.copy()


def _changed(container: Any, copy: Any) -> bool:
    if isinstance(container, dict):
        return not (_same_values(container, list(copy.values())) and all(map(is_, container, copy)))
    if isinstance(container, (list, deque)):
        return not (len(container) == len(copy) and all(map(is_, container, copy)))
    return container != copy if isinstance(container, set) else container.tobytes() != copy.tobytes()


def _put_back(container: Any, copy: Any) -> None:
    # By the methods of the built-in types: a subclass may do more.
    if isinstance(container, OrderedDict):
        OrderedDict.clear(container)
        for key, value in copy.items():
            OrderedDict.__setitem__(container, key, value)
    elif isinstance(container, dict):
        dict.clear(container)
        dict.update(container, copy)
    elif isinstance(container, list):
        container[:] = copy
    elif isinstance(container, deque):
        container.clear()
        container.extend(copy)
    elif isinstance(container, set):
        container.clear()
        container.update(copy)
    else:
        container[...] = copy
