"""Run a model and leave no trace.

A `Pass` is a dispatch mode (see `tape` for what that is) with an undo log: before an operation writes to memory that
was there before the pass began, the old bytes are kept. It need not know whose memory that is: what the pass has made
itself is forgotten, everything else (parameters, buffers, a tensor somebody holds as a plain attribute, in a list, in
a closure) gets its bytes back. What a forward pass changes outside of tensors is put back by `footprint`; the state of
random generators is here.

A pass also sees what operations do not show: `.tolist()` and `.numpy()` hand values to Python without any.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from . import ops
from .footprint import Footprint
from .sharding import PLAIN, local, memory

_THE_FIRST = (0,)
NO_TENSORS = frozenset({int, float, bool, list, type(None)})


class Pass(TorchDispatchMode):
    """A forward pass with an undo log, that knows which parameters and buffers an operation is given.

    Args:
        inputs: the model's inputs. They belong to the caller, but are others in every pass.
        owned: the memories of the model's parameters and buffers, and their identities.

    Attributes:
        generators: those that operations were given to draw with, and the state they had before.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Newer versions wrap every call so that dynamo does not compile it. No pass of ours runs inside of something
        compiled, and the wrapper is a third of what an empty mode costs."""
        return False

    def __init__(self, inputs: list[Tensor], owned: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        super().__init__()
        self._owned = owned
        self._born: set[int] = set()
        self._inputs = {memory(t) for t in inputs}
        self._undo: dict[int, tuple[Any, Any]] = {}  # by memory: what has changed, and what it was
        self._redirected: list[tuple[Tensor, Tensor]] = []
        # Memories of recordings, which must be copied before they are overwritten.
        self._kept: dict[int, Any] = {}
        self.generators: list[tuple[torch.Generator, Tensor]] = []
        self._casts: dict[int, tuple[tuple[int, int], Tensor]] = {}

    @property
    def written(self) -> set[int]:
        """The memories it has written to that outlast it."""
        return set(self._undo)

    @property
    def wrote_input(self) -> bool:
        return not self._inputs.isdisjoint(self._undo)

    def lasts(self, where: int) -> bool:
        """Whether a memory was there before the pass, and is no input's."""
        return where not in self._born and where not in self._inputs

    def undo(self) -> None:
        """Give all memory that outlasts the pass the bytes it had when the pass began."""
        counters = [pair for pair in self._undo.values() if isinstance(pair[1], Tensor)]
        if counters:  # one launch for all of them
            torch._foreach_copy_([t for t, _ in counters], [before for _, before in counters])
        for storage, before in self._undo.values():
            if isinstance(before, Tensor):
                continue
            if storage.nbytes() == before.nbytes():  # FSDP2 takes back what it gathered
                storage.copy_(before)
        self._undo.clear()
        for t, before in self._redirected:
            t.data = before
        self._redirected.clear()

    def read(self, name: str, original: Callable[..., Any], t: Tensor, args: Any, kwargs: Any) -> Any:
        """Somebody takes the values of a tensor to the host, by `t.name()`."""
        return original(t, *args, **kwargs)

    def __enter__(self) -> Any:
        HostReads.watch()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        HostReads.unwatch()
        super().__exit__(*exception)

    def _guarded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation; only the undo log is kept."""
        traits = ops.traits(func)
        if traits.written:
            self._before_write(traits, args, kwargs)
        if traits.kind == "random":
            self._before_draw(func, args, kwargs)
        out = func(*args, **kwargs)
        if traits.fresh:
            self._note_birth(out)
        return out

    def _note_birth(self, out: Any) -> None:
        if type(out) is Tensor:
            self._born.add(out.untyped_storage()._cdata)
            return
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if type(t) is Tensor:
                self._born.add(t.untyped_storage()._cdata)
            elif isinstance(t, Tensor):
                self._born.add(memory(t))

    def _before_write(self, traits: ops.Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if traits.written == _THE_FIRST and type(args[0]) is Tensor and not traits.redirects:
            where = args[0].untyped_storage()._cdata
            if where not in self._born or where in self._kept:
                self._protect(where, args[0])
            return
        for t in written_tensors(traits, args, kwargs):
            self._protect(memory(t), t)
            if traits.redirects:
                self._redirected.append((t, t.detach()))

    def _before_draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        generator = ops.argument(func, "generator", args, kwargs)
        if generator is not None and all(generator is not g for g, _ in self.generators):
            self.generators.append((generator, generator.get_state()))

    def _protect(self, where: int, t: Tensor) -> None:
        """Somebody is about to write to this memory."""
        if where in self._born or where in self._undo:
            return
        # Neither way is an operation on the tensor itself: a graph that saved it must not see its version move.
        if type(t) is Tensor and not t.ndim and t.untyped_storage().nbytes() == t.itemsize:  # a counter
            self._undo[where] = t.data, t.detach().clone()
        else:
            storage = local(t).untyped_storage()
            self._undo[where] = storage, storage.clone()

    def _note_cast(self, source: Any, result: Tensor) -> None:
        """Autocast hands operations a copy of a parameter: remember whose. (Kept alive: memory is used again.)"""
        origin = self._origin(source)
        if origin is not None:
            self._casts[memory(result)] = (origin, result.detach())

    def _origin(self, t: Any) -> tuple[int, int] | None:
        where = t.untyped_storage()._cdata if type(t) in PLAIN else memory(t)
        if where in self._owned:
            return where, t.storage_offset()
        return self._casts[where][0] if where in self._casts else None

    def _given(self, args: tuple[Any, ...]) -> list[Any]:
        """Which parameters and buffers an operation is given, in order."""
        owned, casts = self._owned, self._casts
        found: list[Any] = []
        for a in args:
            kind = type(a)
            if kind is nn.Parameter and (identity := id(a)) in owned:
                found.append(identity)
            elif kind in PLAIN:
                where = a.untyped_storage()._cdata
                if where in owned:
                    found.append((where, a.storage_offset()))
                elif where in casts:
                    found.append(casts[where][0])
            elif kind not in NO_TENSORS and isinstance(a, Tensor):
                found.append(self._origin(a))
        return found


class Guard(Pass):
    """Runs everything; only the undo log is kept."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._guarded(func, args, kwargs or {})


class HostReads:
    """Shows the innermost pass of the reading thread each `.tolist()`, `.numpy()` (which NumPy's own conversions call),
    and so on, of a tensor. These read memory directly, so no dispatch mode can see them."""

    _NAMES = ("tolist", "numpy", "__dlpack__", "__repr__", "apply_", "map_", "map2_")
    _lock = threading.Lock()
    _watching = 0
    _originals: ClassVar[dict[str, Any]] = {}
    _stand_ins: ClassVar[dict[str, tuple[Any, Callable[..., Any]]]] = {}

    @classmethod
    def watch(cls) -> None:
        with cls._lock:
            cls._watching += 1
            if cls._watching == 1:
                present = vars(Tensor)
                for name in cls._NAMES:
                    original = cls._originals[name] = present.get(name)
                    if name not in cls._stand_ins or cls._stand_ins[name][0] is not original:
                        cls._stand_ins[name] = original, _reading(name, original or getattr(Tensor, name))
                    setattr(Tensor, name, cls._stand_ins[name][1])

    @classmethod
    def unwatch(cls) -> None:
        with cls._lock:
            cls._watching -= 1
            if cls._watching == 0:
                for name, original in cls._originals.items():
                    if original is None:
                        delattr(Tensor, name)
                    else:
                        setattr(Tensor, name, original)


def _reading(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        passes = [m for m in _get_current_dispatch_mode_stack() if isinstance(m, Pass)]
        if not passes:
            return original(self, *args, **kwargs)
        with _disable_current_modes():
            return passes[-1].read(name, original, self, args, kwargs)

    return read


class HostRandom:
    """The state of Python's and NumPy's global generators."""

    def __init__(self) -> None:
        self._numpy = getattr(sys.modules.get("numpy"), "random", None)
        self._python_state = random.getstate()
        self._numpy_state = self._numpy.get_state() if self._numpy else None

    def restore(self) -> None:
        random.setstate(self._python_state)
        if self._numpy:
            self._numpy.set_state(self._numpy_state)

    def moved(self) -> bool:
        """Whether somebody has drawn since."""
        if self._python_state != random.getstate():
            return True
        if not self._numpy or self._numpy_state is None:
            return False
        now = self._numpy.get_state()
        return self._numpy_state[2:] != now[2:] or bool((self._numpy_state[1] != now[1]).any())


class TorchRandom:
    """The state of torch's global generators on the CPU and on the device in use. No device is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._cpu_state = torch.get_rng_state()
        # The meta device computes nothing and has no generator.
        self._module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
        self._device = device
        self._device_state = self._module.get_rng_state(device) if self._module else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu_state)
        if self._module:
            self._module.set_rng_state(self._device_state, self._device)


@contextlib.contextmanager
def sandbox(footprint: Footprint, passing: Pass, device: torch.device, audited: bool = False) -> Iterator[None]:
    """Whatever runs in here under `passing` leaves no trace, random generators included."""
    host_random, torch_random = HostRandom(), TorchRandom(device)
    footprint.refresh()
    try:
        with footprint.kept(audited):
            yield
    finally:
        passing.undo()
        put_back(passing.generators)
        host_random.restore()
        torch_random.restore()


def put_back(generators: list[tuple[torch.Generator, Tensor]]) -> None:
    """Give generators the states they had."""
    for generator, state in generators:
        generator.set_state(state)


class NoGraph:
    """For a forward pass that will have no backward: grad may be enabled, but nothing is saved, and autocast keeps no
    copies of the parameters.

    Attributes:
        missed: whether somebody asked for a backward pass all the same.
    """

    def __init__(self) -> None:
        self.missed = False

    def __enter__(self) -> None:
        torch.clear_autocast_cache()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(_DROP, self._unavailable)
        self._hooks.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._hooks.__exit__(kind, error, trace)
        torch.clear_autocast_cache()
        # torch.func refuses to run under such hooks.
        self.missed |= isinstance(error, RuntimeError) and "saved tensor hooks" in str(error)

    def _unavailable(self, packed: Any) -> Tensor:
        self.missed = True
        raise RuntimeError("halfway: nothing was saved for a backward pass")


def foreign_hooks() -> bool:
    """Whether somebody else's saved-tensor hooks lie above those of `NoGraph`."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0] is not _DROP


# What is kept of a tensor that autograd wants to save: nothing to speak of. (A built-in function: called very often.)
_DROP: Any = id


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or outputs."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from tensors_in(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from tensors_in(v)


def written_tensors(traits: ops.Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors an operation writes to."""
    for key in traits.written:
        yield from tensors_in(kwargs.get(key) if isinstance(key, str) else args[key] if key < len(args) else None)
