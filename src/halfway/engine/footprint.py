"""What a forward pass changes outside of tensors, and putting it back: attributes, containers, hooks, submodules.

Models keep counters, lists of auxiliary losses and caches, register hooks and build layers when they first run, and
replace the data of parameters (`p.data = ...`, which no operation shows). All of it is Python state in containers: the
attributes of a module are a dict, so are its hooks, parameters and submodules. A container is put back as a whole, so
that a flag and what it stands for ("hooks are installed") cannot come apart.

In a usual step only the modules before the cut are looked at: their attributes, parameters, submodules and containers.
What else a pass changes (a module behind the cut, a list in a list, an object that a module holds) is found by an
*audit*, which walks through everything. It is made on the first batch, now and then, and whenever a pass leaves the
program of the one before: at that moment, before the first operation that is new. What an audit has once found is
looked at in every step from then on.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..modules import is_compiled
from .containers import CONTAINERS, copied, differs, identical, refill
from .sharding import local, memory, sharded
from .walk import Found, Walk, shown

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Footprint:
    """The state of a model outside of its tensors.

    Attributes:
        modules: all modules of the model.
        owned: the memories of the watched parameters and buffers, and their identities.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._children: list[list[Any]] = []
        # Attributes in which an audit found something that changes: whose they are, and their names.
        self._changing: dict[tuple[int, str], tuple[Any, str]] = {}
        # Modules that have run before the cut, or that an audit saw change.
        self._found: list[nn.Module] = []
        self._names: dict[nn.Module, str] = {}
        self._watched: list[nn.Module] = []
        self._view = _View([])
        self._known: list[Any] = []
        self._data = _Data([])
        self.modules: list[nn.Module] = []
        self.owned: set[int] = set()
        self.refresh()

    def refresh(self, data: bool = True) -> bool:
        """Look again at what is watched, if something was changed from outside; returns whether modules have come or
        gone. `data`: also at where parameters lie."""
        present = self._view.present()
        if self.modules and identical(present, self._known):
            if data:
                self._refresh_data()
            return False
        restructured = [list(m._modules.values()) for m in self.modules] != self._children or not self.modules
        if restructured:
            self._found = []
            self._names = self.names()
            self.modules = list(self._names)
            self._children = [list(m._modules.values()) for m in self.modules]
            self._watched = self.modules
        self._look()
        return restructured

    def _look(self) -> None:
        self._view = _View(self._watched)
        self._known = self._view.present()
        self._refresh_data()

    def _refresh_data(self) -> None:
        # FSDP2 exchanges parameters by itself, at its own times.
        tensors = [] if self._view.shards else self._view.tensors
        if not self._data.holds(tensors):
            self._data = _Data(tensors)
            self.owned = {memory(t) for t in self._view.tensors} | {id(t) for t in self._view.tensors}

    def names(self) -> dict[nn.Module, str]:
        """All modules that the model has now, with their names."""
        return {m: n for n, m in self._root.named_modules()}

    def name(self, module: nn.Module) -> str | None:
        """Its name in the model; None for one that is not in it."""
        return self._names.get(module)

    def watch_all(self) -> None:
        """It is not known which modules run before the cut."""
        self._watched = self.modules
        self._look()

    def watch(self, entered: set[nn.Module], touched: set[int]) -> None:
        """These run before the cut, and the tensors in these memories are used there."""
        self._found += [
            m
            for m in self.modules
            if m not in self._found and (m in entered or any(memory(t) in touched for t in _tensors_of(m)))
        ]
        self._watched = [m for m in self.modules if m in self._found]
        self._look()

    def tensors(self) -> list[Tensor]:
        """All parameters and buffers of the model."""
        return [t for m in self.modules for t in _tensors_of(m)]

    @property
    def shards(self) -> list[Any]:
        """The watched modules that FSDP2 shards."""
        return self._view.shards

    @property
    def compiled(self) -> bool:
        """Whether a watched module is compiled."""
        return self._view.compiled

    def fingerprint(self) -> list[Any]:
        """Changes when a watched parameter or buffer does, but for the statistics that training-mode BatchNorm only
        writes."""
        return self._view.fingerprint()

    def written_statistics(self) -> set[int]:
        """The memories of the statistics that training-mode BatchNorm only writes."""
        return {memory(t) for t in self._view.statistics}

    def save(self) -> Saved:
        """Everything that is watched, as it was when last refreshed: now."""
        more: list[Any] = []
        if self._changing:
            walk = Walk(self._names)
            for owner, name in self._changing.values():
                walk.through(owner, name, vars(owner).get(name) if name else vars(owner))
            more = [found.container for found in walk.found]
        return Saved(self._view, self._known, self._data, more, self.modules)

    def kept(self, audited: bool = False) -> Kept:
        """Whatever happens in here is taken back. If `audited`, everything that the model holds is looked at. To be
        refreshed before."""
        return Kept(self.save(), Audit(self), audited)

    def note_change(self, owner: Any, name: str) -> None:
        """An audit saw something change within this attribute of a module, or (name "") in an attribute of a tensor."""
        self._changing[id(owner), name] = owner, name

    def watch_also(self, modules: list[nn.Module]) -> None:
        """An audit saw these change."""
        self._found += [m for m in modules if m not in self._found]
        more = [m for m in modules if m not in self._watched]
        if more:
            self._watched = [*self._watched, *more]
            self._known = []


class Kept:
    """A context that takes back what a pass changes; an audit may begin in the middle of it."""

    def __init__(self, saved: Saved, audit: Audit, audited: bool) -> None:
        self._saved, self._audit = saved, audit
        if audited:
            audit.begin()

    def __enter__(self) -> Audit:
        return self._audit

    def __exit__(self, kind: Any, *_: object) -> None:
        self._audit.restore()
        self._saved.restore()
        if kind is None:
            self._audit.check()


class Audit:
    """Looks at everything that a model holds, from the moment on that it begins."""

    def __init__(self, footprint: Footprint) -> None:
        self._footprint = footprint
        self._saved: Saved | None = None
        self._walk = Walk({})
        self._contents: list[tuple[Found, Any]] = []

    def begin(self) -> None:
        """From now on, if it has not begun already."""
        if self._saved is not None:
            return
        names = self._footprint.names()
        view = _View(list(names))
        self._saved = Saved(view, view.present(), _Data([] if view.shards else view.tensors), [], view.modules)
        self._walk = Walk(names)
        for module in view.modules:
            for name, value in vars(module).items():
                self._walk.through(module, name, value)
        for t in view.tensors:
            self._walk.through(t, "", vars(t))
        self._contents = [(found, copied(found.container)) for found in self._walk.found]

    def restore(self) -> None:
        if self._saved is None:
            return
        for found, copy in self._contents:
            if differs(found.container, copy):
                refill(found.container, copy)
                self._footprint.note_change(found.owner, found.name)
        self._footprint.watch_also(self._saved.restore())

    def check(self) -> None:
        """Raise if something has changed that cannot be put back."""
        for path, found, before in self._walk.opaque:
            if shown(found) != before:
                raise TypeError(
                    f"{path} is a {type(found).__name__} that the forward pass changes and that halfway cannot put "
                    "back, so it would change more than once per step; draw from the global generators instead, count "
                    "in a plain attribute or a buffer, or do it outside of forward"
                )


class _View:
    """Some modules: their containers, tensors, and what follows from these."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.dicts: list[dict[Any, Any]] = []
        self.sequences: list[Any] = []
        self.others: list[Any] = []
        self.empty: list[Any] = []
        self.owners: dict[int, nn.Module] = {}
        for module in modules:
            for container in [vars(module), *(v for v in vars(module).values() if isinstance(v, CONTAINERS))]:
                self.owners[id(container)] = module
                self._sort_in(container)
        self.tensors = [t for m in modules for t in _tensors_of(m)]
        self.shards = sharded(modules)
        self.compiled = any(map(is_compiled, modules))
        norms = [m for m in modules if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
        self.statistics = [b for m in norms for b in m._buffers.values() if b is not None]
        aside = {id(b) for b in self.statistics}
        self._read = [local(t) for t in self.tensors if id(t) not in aside]

    def _sort_in(self, container: Any) -> None:
        if not len(container):
            self.empty.append(container)
        elif isinstance(container, dict):
            self.dicts.append(container)
        elif isinstance(container, (list, deque)):
            self.sequences.append(container)
        else:
            self.others.append(container)

    def present(self) -> list[Any]:
        """All that its containers hold, for a comparison by identity."""
        # At last, a container that was empty and is not any more.
        return [
            *chain.from_iterable(map(dict.values, self.dicts)),
            *chain.from_iterable(self.dicts),
            *chain.from_iterable(self.sequences),
            *filter(None, self.empty),
        ]

    def fingerprint(self) -> list[Any]:
        return [*map(_address, self._read), *map(_version, self._read), *map(id, self._read)]


class _Data:
    """Tensors, and the data they have now, so that `t.data = ...` can be taken back."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self._data = [t.detach() for t in tensors]
        self._lying = _lying(tensors)

    def holds(self, tensors: list[Tensor]) -> bool:
        """Whether it is these tensors, with this data, that it knows."""
        return identical(tensors, self.tensors) and _lying(tensors) == self._lying

    def restore(self) -> list[Tensor]:
        """Returns those that have changed."""
        if _lying(self.tensors) == self._lying:
            return []
        pairs = zip(self.tensors, self._data, strict=True)
        changed = [(t, before) for t, before in pairs if _lying([t]) != _lying([before])]
        for t, before in changed:
            t.data = before
        return [t for t, _ in changed]


def _lying(tensors: list[Tensor]) -> list[Any]:
    """Where tensors lie, and how large they are."""
    return [*map(_address, tensors), *map(_shape, tensors)]


# Several times a step for every tensor before the cut: `map` over a built-in is the quickest way.
_address, _version, _shape = Tensor.data_ptr, attrgetter("_version"), attrgetter("shape")


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [t for d in (module._parameters, module._buffers) if d for t in d.values() if t is not None]


class Saved:
    """Containers and the data of parameters at one moment.

    Args:
        view: what is looked at; present: what its containers hold; data: of its tensors.
        more: further containers.
        modules: all of the model, on which hooks may be registered.
    """

    def __init__(self, view: _View, present: list[Any], data: _Data, more: list[Any], modules: list[nn.Module]) -> None:
        self._view = view
        self._present = present
        self._contents: list[tuple[Any, Any]] = [(d, {**d}) for d in view.dicts]
        self._contents += [(c, [*c]) for c in view.sequences]
        self._others = [(c, copied(c)) for c in [*view.others, *more]]
        self._data = data
        self._need_gradients = [t.requires_grad for t in data.tensors]
        self._modules = modules
        self._next_hook = RemovableHandle.next_id

    def restore(self) -> list[nn.Module]:
        """Put everything back; returns the modules in which something had changed."""
        changed: list[Any] = []
        # The containers as they were found: what is in them now may be others.
        if not identical(self._view.present(), self._present):
            for container, copy in self._contents:
                if differs(container, copy):
                    changed.append(container)
                    refill(container, copy)
            for container in filter(None, self._view.empty):
                changed.append(container)
                container.clear()
        for container, copy in self._others:
            if differs(container, copy):
                changed.append(container)
                refill(container, copy)
        owners = [self._view.owners[id(c)] for c in changed if id(c) in self._view.owners]
        moved = {id(t) for t in self._data.restore()}
        tensors = self._data.tensors
        if [t.requires_grad for t in tensors] != self._need_gradients:
            for t, needs_gradient in zip(tensors, self._need_gradients, strict=True):
                if t.requires_grad is not needs_gradient:
                    moved.add(id(t))
                    t.requires_grad_(needs_gradient)
        if moved:
            owners += [m for m in self._view.modules if any(id(t) in moved for t in _tensors_of(m))]
        if RemovableHandle.next_id != self._next_hook:
            self._remove_hooks()
        return owners

    def _remove_hooks(self) -> None:
        """Those registered since: on modules whose containers were not saved, and on parameters."""
        owners: list[tuple[Any, tuple[str, ...]]] = [(m, _HOOKS) for m in self._modules]
        owners += [(t, _TENSOR_HOOKS) for m in self._modules for t in _tensors_of(m)]
        for owner, names in owners:
            for name in names:
                hooks = getattr(owner, name) or {}
                for key in [k for k in hooks if k >= self._next_hook]:
                    del hooks[key]
