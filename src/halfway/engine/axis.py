"""Follow the sample axis through a program: where can one sample see another?

A recording may only be used where each sample's part of it depends on that sample alone. Comparing values cannot show
that: a maximum over the batch that happens to lie among the compared rows, a clamp that is not reached today, change
nothing. So the axis itself is followed. Every memory is

- constant: parameters, buffers, what is made of them, of shapes and of nothing;
- rows: it holds a part for each sample, which no other sample has touched;
- mixed: parts may depend on other samples of the batch.

An output has the sample axis if its shape scales with the number of samples, which the same program on N and on S of
them shows. Rows in and no axis out is a reduction over the batch. So is an operation along that axis (`cumsum(0)`), and
a shape that does not scale as one part per sample would (`x @ x.T`). A constant that is not the same for all samples
numbers them (`arange(len(x))`), and who leaves the batch changes the others' numbers; one that is reduced counts them
(`ones(len(x)).sum()`). What is made of something mixed is mixed. In-place writes count for the whole memory, and for
its views.

This cannot see an operation that keeps the axis and reorders it by its own values (`x[perm]`): that is what `rehearsal`
compares values for. The two together are the proof.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import ops
from .plan import possible_layouts
from .sandbox import tensors_in, written_tensors
from .sharding import local, memory

aten = torch.ops.aten

_MADE_BY_PYTHON = "a tensor made of a list or an array"


class Reading(NamedTuple):
    """What an operation reads.

    mixed: why some of it is, or "". rows: whether some of it has a part per sample.
    memories: where it lies. first: the shape of the first argument, if that is a tensor.
    numbered: which of it numbers the samples, or "". counts: whether some of it is a constant with a part per sample.
    leaves: whether it also writes to memory that lasts, as an observer of extremes does.
    undecided: whether some of it was drawn at random for nobody knows which sample; apart: whether other rows are read
    beside that, which will show it.
    """

    mixed: str
    rows: bool
    memories: set[int]
    first: Any
    numbered: str = ""
    leaves: bool = False
    undecided: bool = False
    apart: bool = False
    counts: bool = False


class Logged(NamedTuple):
    """An operation of the program as it ran on all N samples.

    shapes: of its outputs. along: the shape of its first argument and the axes it works along, if it names any.
    """

    func: Any
    shapes: Any
    along: tuple[Any, ...] = ()


def shapes(out: Any) -> Any:
    """Of what an operation gave, for the log."""
    if isinstance(out, Tensor):
        return out.shape
    return tuple([o.shape if isinstance(o, Tensor) else None for o in out]) if isinstance(out, (tuple, list)) else None


def along(func: Any, traits: ops.Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The axes that an operation works along, for the log."""
    if not args or not isinstance(args[0], Tensor):
        return ()
    dims = ops.argument(func, traits.dim, args, kwargs)
    return args[0].shape, tuple(dims) if isinstance(dims, list) else dims


class SampleAxis:
    """Which memories of a pass on `retained` of `size` samples are rows, and which are mixed.

    Args:
        inputs: the model's inputs; those with an entry per sample are rows.
        owned: the memories of the model's parameters and buffers.
        lasts: whether a memory was there before the pass.
    """

    def __init__(
        self, size: int, retained: int, inputs: list[Tensor], owned: set[int], lasts: Callable[[int], bool]
    ) -> None:
        self._size = size
        self._retained = retained
        self._owned = owned
        self._lasts = lasts
        self._rows = {memory(t) for t in inputs if t.ndim and t.shape[0] == retained}
        self._mixed: dict[int, str] = {}
        self._unset: set[int] = set()
        # Views of rows that lack the axis, such as x[0]: mixed as soon as something reads them.
        self._without_axis: dict[tuple[Any, ...], str] = {}
        # Constants, or views of them, that differ from sample to sample.
        self._numbered: dict[Any, str] = {}
        # Constants, or views of them, that have a part for each sample, numbered or not.
        self._counts: set[Any] = set()
        # Views of these that have lost it, such as ones(n, 4)[0].
        self._one_part: set[Any] = set()
        # Random draws that may belong to this sample or to that one, and what is made of them alone.
        self._undecided: set[int] = set()
        # Weak references: the data is freed, but its address is not given to another tensor.
        self._held: dict[int, StorageWeakRef] = {}

    def read(self, traits: ops.Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """What the operation will read; to be asked before it runs."""
        mixed, rows, numbered, undecided, apart, counts = "", False, "", False, False, False
        memories = set()
        written = _written(traits, args, kwargs)
        for t in tensors_in((args, kwargs)):
            where = memory(t)
            memories.add(where)
            if t.numel() == 0 or (where in self._unset and where in written):
                continue
            if where in self._unset:
                mixed = mixed or "memory that was filled by something no dispatch mode can see"
            mixed = mixed or self._mixed.get(where) or self._without_axis.get(_view(t), "")
            rows |= where in self._rows
            undecided |= where in self._undecided
            apart |= where in self._rows and where not in self._undecided
            counts |= (where in self._counts or _view(t) in self._counts) and _view(t) not in self._one_part
            number = self._numbered.get(where) or self._numbered.get(_view(t), "")
            if self._may_number(t) and self._lasts(where) and where not in self._owned:
                number = _MADE_BY_PYTHON
            # x[arange(len(x)), ...] is x, unless Python may think of another order next time.
            identity = traits.logged is aten.index.Tensor and number != _MADE_BY_PYTHON and _is_arange(t)
            if number and not identity:
                numbered = numbered or number
        first = args[0].shape if args and isinstance(args[0], Tensor) else None
        if traits.value_free:
            return Reading("", False, memories, first)
        if rows and numbered:
            mixed = mixed or f"{numbered}, which numbers the samples"
        leaves = any(map(self._lasts, written))
        return Reading(mixed, rows, memories, first, numbered, leaves, undecided, apart, counts)

    def _may_number(self, t: Tensor) -> bool:
        """Whether there is a part for each sample, and not one part expanded to all."""
        return t.ndim > 0 and t.shape[0] == self._retained and t.stride(0) != 0

    def judge(self, reading: Reading, traits: ops.Traits, full: Logged | None, out: Any, name: str) -> list[str]:
        """For each tensor in `out` why it is mixed, or "". `full`: the operation on all samples; None for one that is
        not in the program, and hands on what it gets."""
        found = list(tensors_in(out))
        if reading.mixed or not found:
            return [reading.mixed] * len(found)
        if full is None:
            return [""] * len(found)
        shapes = shapes_on_all(full, out)
        if reading.rows and reading.leaves:
            return [f"{name}, which writes what it reads of the batch into memory that lasts"] * len(found)
        if reading.rows and (traits.opaque or None in shapes):
            return [f"{name}, of which nobody knows whether it keeps samples apart"] * len(found)
        if reading.rows and (traits.mixing or _along_samples(full, reading.first)):
            return [f"{name}, which works along the batch"] * len(found)
        return [self._judge(reading, s, t, name) for s, t in zip(shapes, found, strict=True)]

    def _judge(self, reading: Reading, full: Any, t: Tensor, name: str) -> str:
        places = possible_layouts(full, t.shape, self._size, self._retained) if full is not None else []
        if places is None:
            return (
                f"{name}, which gives {tuple(full)} for {self._size} samples and {tuple(t.shape)} for {self._retained}"
            )
        if reading.rows and not places and t.numel():
            return f"{name}, which reduces over the batch"
        view = memory(t) in reading.memories
        if reading.counts and full is not None and not places and t.numel() and not view:
            return f"{name}, which counts the samples"
        return ""

    def follow(
        self,
        reading: Reading,
        traits: ops.Traits,
        full: Logged | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        name: str,
    ) -> None:
        """Note what the operation has made of what it read."""
        reasons = self.judge(reading, traits, full, out, name)
        written = _written(traits, args, kwargs)
        for t, why, shape in zip(tensors_in(out), reasons, shapes_on_all(full, out), strict=True):
            where = memory(t)
            view = where in reading.memories and where not in written
            if view and why and where not in self._mixed:
                self._without_axis[_view(t)] = why
            if not view:
                self._set(where, t, why, reading.rows, fresh=where not in written)
                if reading.undecided and not reading.apart:
                    self._undecided.add(where)
                if traits.empty:
                    self._unset.add(where)
            if reading.rows or why:
                continue
            key = _view(t) if view else where
            places = None if shape is None else possible_layouts(shape, t.shape, self._size, self._retained)
            if places:
                self._counts.add(key)
            elif view and reading.counts and shape is not None:
                self._one_part.add(key)
            if traits.value_free:
                continue
            if reading.numbered if shape is None else self._differs(shape, t, traits):
                self._numbered[key] = _MADE_BY_PYTHON if traits.from_host else reading.numbered or name
        unseen = reading.mixed or (f"{name}, whose effect does not show" if reading.rows else "")
        for where in written:
            self._unset.discard(where)
            why = next(filter(None, reasons), "" if reasons else unseen)
            if why:
                self._mixed.setdefault(where, why)

    def _differs(self, full: Any, t: Tensor, traits: ops.Traits) -> bool:
        """Whether a constant that has the sample axis may not be the same for all samples. `full`: its shape on N."""
        places = possible_layouts(full, t.shape, self._size, self._retained)
        if not places or not t.stride(places[0].dim) or t.is_meta:
            return False
        if self._retained == 1 or traits.from_host:  # nothing to compare it with; Python may make another one next time
            return True
        parts = (place.first(t, self._retained) for place in places[:2])
        return all(bool((part != part[:1]).any()) for part in parts)

    def keep(self, t: Tensor, reading: Reading) -> None:
        """`t` is what was read: a normalisation with given statistics."""
        self._set(memory(t), t, reading.mixed, reading.rows)

    def drawn(self, numbers: list[Tensor], full: list[Any]) -> None:
        """Random numbers: rows if there is a part for each sample, otherwise constant. `full`: their shapes on N."""
        for t, shape in zip(numbers, full, strict=True):
            self._set(memory(t), t, "", shape != t.shape)
            if len(possible_layouts(shape, t.shape, self._size, self._retained) or ()) > 1:
                self._undecided.add(memory(t))

    def _set(self, where: int, t: Tensor, why: str, rows: bool, fresh: bool = True) -> None:
        if where not in self._held:
            self._held[where] = StorageWeakRef(local(t).untyped_storage())
        if fresh:
            self._mixed.pop(where, None)
            self._numbered.pop(where, None)
            self._counts.discard(where)
            self._rows.discard(where)
            self._unset.discard(where)
            self._undecided.discard(where)
        if why:
            self._mixed.setdefault(where, why)
        elif rows:
            self._rows.add(where)


def shapes_on_all(full: Logged | None, out: Any) -> list[Any]:
    """The shapes that the tensors in `out` have on N samples; None where that is not known."""
    count = sum(1 for _ in tensors_in(out))
    logged = [] if full is None else [full.shapes] if isinstance(out, Tensor) else full.shapes or ()
    shapes = [s for s in logged if s is not None]
    return shapes if len(shapes) == count else [None] * count


def _is_arange(t: Tensor) -> bool:
    flat = t.flatten()
    return not t.is_floating_point() and bool((flat == torch.arange(len(flat), device=t.device)).all())


def _along_samples(full: Logged, part: Any) -> bool:
    """Whether an operation names an axis to work along that holds samples. part: its first argument's shape on S."""
    if not full.along:
        return False
    shape, dims = full.along
    if part is None or len(part) != len(shape):
        return False
    named = dims if isinstance(dims, tuple) else () if dims is None else (dims,)
    # None named means all of them: a roll of the flattened tensor.
    return any(shape[d] != part[d] for d in named or range(len(shape)) if len(shape))


def _written(traits: ops.Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    return {memory(t) for t in written_tensors(traits, args, kwargs)} if traits.written else set()


def _view(t: Tensor) -> tuple[Any, ...]:
    return memory(t), t.storage_offset(), tuple(t.shape), t.stride()
