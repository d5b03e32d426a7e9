"""What a forward pass writes to tensors that outlive it, and how to take that back.

A `Pass` is a dispatch mode (see `replay` for what that is) with an undo log: before an operation writes to a parameter,
a buffer or an input of the model, the old value is kept. So a pass can leave no trace, whatever the model does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import ops
from .sharding import local


class Memory:
    """The tensors that outlive a pass, by the memory they occupy: parameters and buffers, and the model's inputs."""

    def __init__(self, lasting: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        self.lasting: dict[int, list[Tensor]] = {}
        self.inputs: dict[int, list[Tensor]] = {}
        for tensors, where in ((lasting, self.lasting), (inputs, self.inputs)):
            for t in tensors:
                where.setdefault(address(t), []).append(t)


class Pass(TorchDispatchMode):
    """A pass with an undo log, that knows which parameters and buffers an operation is given."""

    supports_higher_order_operators = True

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory
        self._undo: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._casts: dict[int, tuple[tuple[int, int], Tensor]] = {}
        self.wrote_input = False

    @property
    def written(self) -> set[int]:
        """Where it has written to memory that outlasts it."""
        return set(self._undo)

    def undo(self) -> None:
        """Give parameters, buffers and inputs the values they had when the pass began."""
        with torch.no_grad():
            for saved in self._undo.values():
                for t, before in saved:
                    # Through .data: a graph that saved this tensor must not see its version move.
                    t.data.copy_(before)
        self._undo.clear()

    def _before_write(self, written: tuple[int | str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for key in written:
            value = kwargs.get(key) if isinstance(key, str) else args[key] if key < len(args) else None
            for t in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(t, Tensor):
                    self._protect(address(t))

    def _protect(self, where: int) -> None:
        if where in self._undo:
            return
        targets = self._memory.lasting.get(where, []) + self._memory.inputs.get(where, [])
        if targets:
            self._undo[where] = [(t, t.detach().clone()) for t in targets]
            self.wrote_input |= where in self._memory.inputs

    def _note_cast(self, source: Any, result: Tensor) -> None:
        """Autocast hands operations a copy of a parameter: remember whose. (Kept alive: addresses are reused.)"""
        origin = self._origin(source)
        if origin is not None:
            self._casts[address(result)] = (origin, result.detach())

    def _origin(self, t: Any) -> tuple[int, int] | None:
        where = address(t)
        if where in self._memory.lasting:
            return where, t.storage_offset()
        cast = self._casts.get(where)
        return cast[0] if cast else None

    def _given(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(self._origin(a) for a in args if isinstance(a, Tensor))


class Guard(Pass):
    """Runs everything; only the undo log is kept."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = ops.traits(func).written
        if written:
            self._before_write(written, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def address(t: Tensor) -> int:
    """Where the memory of a tensor begins: the same for all its views."""
    return local(t).untyped_storage().data_ptr()


@contextlib.contextmanager
def no_graph() -> Iterator[None]:
    """For a forward pass that will have no backward: grad may be enabled, but nothing is saved, and autocast keeps no
    copies of the parameters."""
    torch.clear_autocast_cache()
    try:
        with torch.autograd.graph.saved_tensors_hooks(_drop, _unavailable):
            yield
    finally:
        torch.clear_autocast_cache()


def foreign_hooks() -> bool:
    """Whether somebody else's saved-tensor hooks lie above those of `no_graph`."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0] is not _drop


def _drop(t: Tensor) -> None:
    return None


def _unavailable(packed: Any) -> Tensor:
    raise RuntimeError("halfway: no backward pass through this forward pass")
