"""Follow the sample axis through a program: where can one sample see another?

A recording may only be used where each sample's part of it depends on that sample alone. Comparing values cannot show
that: a maximum over the batch that happens to lie among the compared rows, a clamp that is not reached today, change
nothing. So the axis itself is followed. Every memory is

- constant: parameters, buffers, what is made of them, of shapes and of nothing;
- rows: it holds a part for each sample, which no other sample has touched;
- mixed: parts may depend on other samples of the batch.

An output has the sample axis if its shape scales with the number of samples, which the same program on N and on S of
them shows. Rows in and no axis out is a reduction over the batch. So is an operation along that axis (`cumsum(0)`), and
a shape that does not scale as one part per sample would (`x @ x.T`). What is made of something mixed is mixed. In-place
writes count for the whole memory, and for its views.

This cannot see an operation that keeps the axis and reorders it by its own values (`x[perm]`): that is what `rehearsal`
compares values for. The two together are the proof.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import ops
from .plan import candidates
from .sandbox import memory, tensors_in, written_tensors
from .sharding import local


class Reading(NamedTuple):
    """What an operation reads.

    mixed: why some of it is, or "". rows: whether some of it has a part per sample.
    memories: where it lies. first: the shape of the first argument, if that is a tensor.
    """

    mixed: str
    rows: bool
    memories: set[int]
    first: Any


class Logged(NamedTuple):
    """An operation of the program as it ran on all N samples.

    shapes: of its outputs. along: the shape of its first argument and the axes it works along, if it names any.
    """

    func: Any
    shapes: Any
    along: tuple[Any, ...] = ()


def log(traits: ops.Traits, args: tuple[Any, ...], out: Any) -> Logged:
    """The entry of an operation in the program."""
    if isinstance(out, Tensor):
        shapes: Any = out.shape
    elif isinstance(out, (tuple, list)):
        shapes = tuple(o.shape if isinstance(o, Tensor) else None for o in out)
    else:
        shapes = None
    at = traits.dim
    if at is None or not args or not isinstance(args[0], Tensor):
        return Logged(traits.logged, shapes)
    dims = args[at] if at < len(args) else None
    return Logged(traits.logged, shapes, (args[0].shape, tuple(dims) if isinstance(dims, list) else dims))


class SampleAxis:
    """Which memories of a pass on `retained` of `size` samples are rows, and which are mixed.

    Args:
        inputs: the model's inputs; those with an entry per sample are rows.
        lasts: whether a memory was there before the pass.
    """

    def __init__(self, size: int, retained: int, inputs: list[Tensor], lasts: Callable[[int], bool]) -> None:
        self._size = size
        self._retained = retained
        self._lasts = lasts
        self._rows = {memory(t) for t in inputs if t.ndim and t.shape[0] == retained}
        self._mixed: dict[int, str] = {}
        self._unset: set[int] = set()
        # Views of rows that lack the axis, such as x[0]: mixed as soon as something reads them.
        self._without_axis: dict[tuple[Any, ...], str] = {}
        # Weak references: the data is freed, but its address is not given to another tensor.
        self._held: dict[int, StorageWeakRef] = {}

    def read(self, traits: ops.Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """What the operation will read; to be asked before it runs."""
        mixed, rows = "", False
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
        first = args[0].shape if args and isinstance(args[0], Tensor) else None
        return Reading("", False, memories, first) if traits.value_free else Reading(mixed, rows, memories, first)

    def judge(self, reading: Reading, traits: ops.Traits, full: Logged | None, out: Any, name: str) -> list[str]:
        """For each tensor in `out` why it is mixed, or "". `full`: the operation on all samples; None for one that is
        not in the program, and hands on what it gets."""
        found = list(tensors_in(out))
        if reading.mixed or not found:
            return [reading.mixed] * len(found)
        if full is None:
            return [""] * len(found)
        shapes = [s for s in ([full.shapes] if isinstance(out, Tensor) else full.shapes or ()) if s is not None]
        if reading.rows and (traits.opaque or len(shapes) != len(found)):
            return [f"{name}, of which nobody knows whether it keeps samples apart"] * len(found)
        if reading.rows and _along_samples(full, reading.first):
            return [f"{name}, which works along the batch"] * len(found)
        return [self._judge(reading, s, t, name) for s, t in zip(shapes, found, strict=False)]

    def _judge(self, reading: Reading, full: Any, t: Tensor, name: str) -> str:
        places = candidates(full, t.shape, self._size, self._retained)
        if places is None:
            return (
                f"{name}, which gives {tuple(full)} for {self._size} samples and {tuple(t.shape)} for {self._retained}"
            )
        if reading.rows and not places and t.numel():
            return f"{name}, which reduces over the batch"
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
        for t, why in zip(tensors_in(out), reasons, strict=True):
            where = memory(t)
            if where in reading.memories and where not in written:  # a view
                if why and not reading.mixed:
                    self._without_axis[_view(t)] = why
                continue
            self._set(where, t, why, reading.rows, fresh=where not in written)
            if traits.empty:
                self._unset.add(where)
        for where in written:
            self._unset.discard(where)
            if not reasons and reading.mixed:
                self._mixed.setdefault(where, reading.mixed)
            if reading.rows and self._lasts(where):
                self._mixed.setdefault(where, f"{name}, which writes what it reads of the batch into memory that lasts")

    def keep(self, t: Tensor, like: Tensor) -> None:
        """`t` is what `like` is: a normalisation with given statistics."""
        where, source = memory(t), memory(like)
        self._set(where, t, self._mixed.get(source, ""), source in self._rows)

    def drawn(self, numbers: list[Tensor], full: list[Any]) -> None:
        """Random numbers: rows if there is a part for each sample, otherwise constant. `full`: their shapes on N."""
        for t, shape in zip(numbers, full, strict=True):
            self._set(memory(t), t, "", shape != t.shape)

    def _set(self, where: int, t: Tensor, why: str, rows: bool, fresh: bool = True) -> None:
        if where not in self._held:
            self._held[where] = StorageWeakRef(local(t).untyped_storage())
        if fresh:
            self._mixed.pop(where, None)
            self._rows.discard(where)
            self._unset.discard(where)
        if why:
            self._mixed.setdefault(where, why)
        elif rows:
            self._rows.add(where)


def _along_samples(full: Logged, part: Any) -> bool:
    """Whether an operation names an axis to work along that holds samples. part: its first argument's shape on S."""
    if not full.along:
        return False
    shape, dims = full.along
    if dims is None or part is None or len(part) != len(shape):
        return False
    named = dims if isinstance(dims, tuple) else (dims,)
    return any(isinstance(d, int) and shape[d] != part[d] for d in named if len(shape))


def _written(traits: ops.Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    return {memory(t) for t in written_tensors(traits, args, kwargs)} if traits.written else set()


def _view(t: Tensor) -> tuple[Any, ...]:
    return memory(t), t.storage_offset(), tuple(t.shape), t.stride()
