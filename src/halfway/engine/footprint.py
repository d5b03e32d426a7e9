"""What a forward pass changes outside of tensors, and putting it back: attributes, containers, hooks, submodules.

Models keep counters, lists of auxiliary losses and caches, register hooks and build layers when they first run, and
replace the data of parameters (`p.data = ...`, which no operation shows). All of it is Python state in containers: the
attributes of a module are a dict, so are its hooks, parameters and submodules. A container is put back as a whole, so
that a flag and what it stands for ("hooks are installed") cannot come apart.

In every step the attributes of all modules are looked at, and the containers among those of the modules before the
cut. What else a pass changes (a list in a list, an object that a module holds) is found by an *audit*, which walks
through everything; it is made on the first batch, and whenever the program is a new one. Attributes in which it found
something are then walked through in every step.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from operator import is_
from types import GeneratorType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .sharding import memory, sharded

_CONTAINERS = (dict, list, set, deque, bytearray)
# Objects of these packages keep state that cannot be read or set from outside, but that shows when they are pickled.
_COUNTING = frozenset({"itertools", "random", "numpy", "array"})
# An audit goes so deep, looks at so many containers, and into those of at most so many entries.
_DEPTH, _MANY, _LONG = 5, 20_000, 1_000
_PICKLED = 1 << 16
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Footprint:
    """The state of a model outside of its tensors.

    Attributes:
        modules: all modules of the model.
        entered: those that run before the cut; all, until `enter` says which.
        memories: where parameters and buffers lay when something was last saved.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._known: list[tuple[nn.Module, list[Any]]] = []
        # Attributes in which an audit found something that changes: whose they are, and their names.
        self._changing: dict[tuple[int, str], tuple[Any, str]] = {}
        self._names: dict[nn.Module, str] = {}
        self.modules: list[nn.Module] = []
        self.entered: list[nn.Module] = []
        self.memories: set[int] = set()
        self._data = _Data([])
        self.refresh()

    def refresh(self) -> bool:
        """List the modules again if some have come or gone; returns whether they have."""
        if self._known and all(_same_values(m._modules, children) for m, children in self._known):
            return False
        self.modules = list(self._root.modules())
        self._known = [(m, list(m._modules.values())) for m in self.modules]
        self._names = {m: n for n, m in self._root.named_modules()}
        self.entered = self.modules
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

    def shards(self) -> list[Any]:
        """The modules that FSDP2 shards."""
        return sharded(self.modules)

    def _present_data(self) -> _Data:
        # FSDP2 exchanges parameters by itself, at its own times.
        tensors = [] if self.shards() else self.tensors()
        if not self._data.holds(tensors):
            self._data = _Data(tensors)
            self.memories = {memory(t) for t in self.tensors()}
        return self._data

    def save(self) -> Saved:
        """Everything as it is now."""
        self.refresh()
        containers: list[Any] = [vars(m) for m in self.modules]
        for module in self.entered:
            containers += [v for v in vars(module).values() if isinstance(v, _CONTAINERS)]
        containers += [m._modules for m, children in self._known if children]
        walk = _Walk(self._names)
        for owner, name in self._changing.values():
            walk.through(owner, name, vars(owner).get(name) if name else vars(owner))
        containers += [found.container for found in walk.found]
        return Saved(self, containers, self._present_data())

    @contextlib.contextmanager
    def kept(self, audited: bool = False) -> Iterator[None]:
        """Whatever happens in here is taken back. If `audited`, everything that the model holds is looked at."""
        saved = self.save()
        walk = _Walk(self._names)
        if audited:
            for module in self.modules:
                for name, value in vars(module).items():
                    walk.through(module, name, value)
            for t in self.tensors():
                walk.through(t, "", vars(t))
        contents = [(found, _copy(found.container)) for found in walk.found]
        try:
            yield
        finally:
            for found, copy in contents:
                if _changed(found.container, copy):
                    _put_back(found.container, copy)
                    self._changing[id(found.owner), found.name] = found.owner, found.name
            saved.restore()
        for path, found, before in walk.opaque:
            if _shown(found) != before:
                raise TypeError(
                    f"{path} is a {type(found).__name__} that the forward pass changes and that halfway cannot put "
                    "back, so it would change more than once per step; draw from the global generators instead, count "
                    "in a plain attribute or a buffer, or do it outside of forward"
                )


class _Data:
    """Tensors, and the data they have now, so that `t.data = ...` can be taken back."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._data = [t.detach() for t in tensors]
        self._lying = _lying(tensors)

    def holds(self, tensors: list[Tensor]) -> bool:
        """Whether it is these tensors, with this data, that it knows."""
        same = len(tensors) == len(self.tensors) and all(map(is_, tensors, self.tensors))
        return same and _lying(tensors) == self._lying

    def restore(self) -> None:
        if _lying(self.tensors) != self._lying:
            for t, before in zip(self.tensors, self._data, strict=True):
                if _lying([t]) != _lying([before]):
                    t.data = before


def _lying(tensors: list[Tensor]) -> list[Any]:
    """Where tensors lie, and how large they are."""
    return [(t.data_ptr(), t.shape) for t in tensors]


class Saved:
    """The containers and the data of parameters at one moment."""

    def __init__(self, footprint: Footprint, containers: Iterable[Any], data: _Data) -> None:
        self._footprint = footprint
        self._contents: list[tuple[Any, Any]] = []
        self._empty: list[Any] = []
        for container in containers:
            if len(container):
                self._contents.append((container, _copy(container)))
            else:
                self._empty.append(container)
        self._data = data
        self._need_gradients = [t.requires_grad for t in data.tensors]
        self._next_hook = RemovableHandle.next_id

    def restore(self) -> None:
        for container, copy in self._contents:
            if _changed(container, copy):
                _put_back(container, copy)
        for container in self._empty:
            if container:
                container.clear()
        self._data.restore()
        for t, needs_gradient in zip(self._data.tensors, self._need_gradients, strict=True):
            if t.requires_grad is not needs_gradient:
                t.requires_grad_(needs_gradient)
        if RemovableHandle.next_id != self._next_hook:
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        """Those registered since: on modules behind the cut, whose containers were not saved, and on parameters."""
        owners = [(m, _HOOKS) for m in self._footprint.modules] + [(t, _TENSOR_HOOKS) for t in self._data.tensors]
        for owner, names in owners:
            for name in names:
                hooks = getattr(owner, name) or {}
                for key in [k for k in hooks if k >= self._next_hook]:
                    del hooks[key]


class _Found(NamedTuple):
    """A container, and the attribute it was found in."""

    owner: Any
    name: str
    container: Any


class _Walk:
    """Goes through what modules hold: containers, and objects of the model's own package.

    Attributes:
        found: the containers.
        opaque: objects that cannot be looked into, with their path and what they show of themselves.
    """

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self.found: list[_Found] = []
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
            elif isinstance(value, _CONTAINERS) or _is_array(value):
                self.found.append(_Found(owner, name, value))
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
                    self.opaque.append((path, value, _shown(value)))


def _entries(path: str, container: Any) -> list[tuple[str, Any]]:
    if isinstance(container, dict):
        return [(f"{path}[{k!r}]", v) for k, v in container.items()]
    return [(f"{path}[{i}]", v) for i, v in enumerate(container)] if isinstance(container, (list, set, deque)) else []


class _Bounded(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() > _PICKLED:
            raise OverflowError
        return super().write(data)


def _shown(value: Any) -> bytes:
    """What an object shows of its state when it is pickled; a generator, which cannot be, by its frame."""
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        return b"" if frame is None else b"%d" % frame.f_lasti + _shown(list(frame.f_locals.values()))
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
    if isinstance(container, bytearray):
        return bytes(container)
    return set(container) if isinstance(container, set) else container.copy()


def _changed(container: Any, copy: Any) -> bool:
    if isinstance(container, dict):
        return not (_same_values(container, list(copy.values())) and all(map(is_, container, copy)))
    if isinstance(container, (list, deque)):
        return not (len(container) == len(copy) and all(map(is_, container, copy)))
    return container != copy if isinstance(container, (set, bytearray)) else container.tobytes() != copy.tobytes()


def _put_back(container: Any, copy: Any) -> None:
    # By the methods of the built-in types: a subclass may do more.
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
