"""Record a forward pass on all samples, to replay it for some of them.

The problem. A step of Partial Forward Blocking runs the shallow layers on N samples, looks at the result, and goes on
with S of them. Cutting the feature map to S rows there does not save what it should: autograd has a graph of N rows
below the cut and sends zeros through it for every pruned sample. Running the shallow layers again on S rows gives a
clean graph, but pays their forward twice. What we want is the clean graph of S rows *without* computing it again.

The idea. PyTorch lets a *dispatch mode* (`TorchDispatchMode`) see every operation on its way from autograd to the
kernel: `__torch_dispatch__(func, ..., args)` is called instead of the kernel and returns what the kernel would have
returned. Autograd sits above. It has already noted "a convolution of x with w happened here" and what it must save
for the backward pass, and it does not care who produced the numbers. So:

1. *Probe.* The model runs up to the cut on all N samples under a `Recorder`, which lets everything happen and keeps
   the outputs of the expensive operations (convolutions, matrix products, attention), the statistics of BatchNorm
   and all random draws, in order: the tape.
2. *Select.* Somebody chooses S rows.
3. *Replay.* The model is called on the S retained samples under a `Replayer`. Cheap operations (activations,
   additions, views, normalisation) run as usual, on S rows. When an expensive one comes along, it is not computed:
   its recorded output, cut to the S rows, is handed back. Autograd has built a normal graph of S rows, and
   everything above it (backward, mixed precision, DDP) is standard.

Why only expensive operations? Cutting a recording costs as much memory traffic as a cheap operation itself, so
recording those would buy nothing, cost memory, and bring every hazard of in-place operations with it.

BatchNorm needs its own rule, since it ties samples together: in the replay it normalises with the recorded mean and
variance of all N samples, so activations are exactly those of the probe. The backward pass is BatchNorm's usual one on
S rows: its two correction terms are means over the S retained samples (not over N, as if the pruned ones had sent
zero gradients).

When is a recording right? The replayed program must be the recorded one. The two passes are compared as they go: the
sequence of operations, the shapes and parameters they are given, every value the program reads on the host. At the
first difference the replay raises `Diverged`; the caller undoes what this pass has changed (see `sandbox`) and simply
runs the model. And no sample may have had a part in another's recording: that is proven once for each program, see
`axis` and `rehearsal`. An operation that something of the whole batch reaches is computed. Slower, never wrong.

Memory. A recorded output whose memory is about to be overwritten (`relu_` on a convolution's output) is copied first.
In the replay each entry of the tape is released as soon as it has been used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from . import axis, batch_norm, ops
from .plain import NOTHING, Given, given
from .sandbox import Pass, foreign_hooks, tensors_in, written_tensors
from .sharding import memory

aten = torch.ops.aten


class Diverged(BaseException):
    """The replayed program is not the recorded one. A BaseException: no model's own `except` should swallow it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Entry:
    """One recorded operation.

    outputs: its outputs on all N samples; for a draw first what it wrote to its arguments, for BatchNorm mean and
    inverse standard deviation, for a host read the value.
    given: which parameters and buffers it was called with.
    moved: for BatchNorm, what the running mean and variance were and became; None for one it does not keep.
    """

    __slots__ = ("func", "given", "moved", "outputs")

    def __init__(self, func: Any, outputs: list[Any], given: Sequence[Any] = (), moved: Sequence[Any] = ()) -> None:
        self.func = func
        self.outputs = outputs
        self.given = given
        self.moved = moved


class Tape:
    """The recording of one probe of `size` samples. `refusal` says why it cannot be replayed, if it cannot.

    Attributes:
        owned: the memories of parameters and buffers, as far as they were known.
        program: all operations, cheap ones included, each as `axis.Logged`. What is proven of a program holds for no
            other.
        plain: what each of them was given beside tensors. This may be something else in every step.
    """

    def __init__(self, size: int, owned: set[int]) -> None:
        self.size = size
        self.owned = owned
        self.entries: list[Entry | None] = []
        self.program: list[tuple[Any, ...]] = []
        self.plain: list[Given] = []
        self.refusal = ""

    def refuse(self, reason: str) -> None:
        """Nothing more needs to be kept, nor what was; but the program goes on, for whoever compares it."""
        self.refusal = self.refusal or reason
        self.entries.clear()

    def add(self, entry: Entry) -> None:
        if not self.refusal:
            self.entries.append(entry)


class Recorder(Pass):
    """Runs everything, keeps what a replay will need.

    Attributes:
        finished: whether the cut has been reached. Whatever still runs then (a model may swallow what ends the pass)
            is only undone.
        touched: if a set, the memories of all that operations read or write are collected in it.
    """

    def __init__(self, inputs: list[Tensor], owned: set[int], size: int) -> None:
        super().__init__(inputs, owned)
        self.tape = Tape(size, owned)
        self.finished = False
        self.touched: set[int] | None = None
        # The program that is expected, how long it is, and where in it this pass is.
        self._expected: list[Any] | None = None
        self._length = self._at = 0
        self._on_another: Callable[[], None] = lambda: None

    def expect(self, program: list[Any], on_another: Callable[[], None]) -> None:
        """Call `on_another` before the first operation that this program does not have, or once it is at its end."""
        self._expected, self._length, self._on_another = program, len(program), on_another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.finished:
            return self._guarded(func, args, kwargs)
        try:
            traits = ops.KNOWN[id(func)]
        except KeyError:
            traits = ops.traits(func)
        logged = traits.logged
        if logged is not None:
            if traits.refusal and not ops.excused(func, args):
                self.tape.refuse(traits.refusal)
            expected = self._expected
            if expected is not None:
                at, self._at = self._at, self._at + 1
                if at >= self._length or expected[at][0] is not logged:
                    self._leave_the_expected()
            plain = given(traits, args, kwargs) if traits.plain or kwargs else NOTHING
        if self.touched is not None:
            self.touched.update(map(memory, tensors_in((args, kwargs))))
        out = self._run(func, traits, args, kwargs)
        if traits.fresh:
            if type(out) is Tensor:
                self._born.add(out.untyped_storage()._cdata)
            else:  # of a BatchNorm the model gets the first output only
                self._note_birth(out[:1] if traits.kind == "batch_norm" else out)
        if logged is not None:
            shapes = out.shape if type(out) is Tensor else axis.shapes(out)
            along = axis.along(func, traits, args, kwargs) if traits.dim else ()
            self.tape.program.append((logged, shapes, along))
            self.tape.plain.append(plain)
        return out

    def _leave_the_expected(self) -> None:
        self._expected = None
        self._on_another()

    def _run(self, func: Any, traits: ops.Traits, args: Any, kwargs: Any) -> Any:
        kind = traits.kind
        if kind == "batch_norm" and batch_norm.trains(traits, args, kwargs):
            self._refuse_in_checkpoint(func)
            return self._record_batch_norm(func, traits, args, kwargs)
        if traits.written and kind != "batch_norm":  # a frozen one only reads its running statistics
            self._before_write(traits, args, kwargs)
        if kind == "random":
            self._before_draw(func, args, kwargs)
        out = func(*args, **kwargs)
        if kind == "cheap" or kind == "batch_norm":
            if func is aten._to_copy.default:
                self._note_cast(args[0], out)
            return out
        if kind == "random":
            self._refuse_in_checkpoint(func)
        elif kind == "expensive" and traits.dropout and ops.argument(func, "dropout_p", args, kwargs):
            self.tape.refuse(f"the shallow part uses fused attention with dropout ({func})")
        if self.tape.refusal:
            self._kept.clear()
            return out
        self.tape.entries.append(self._entry(func, traits, args, kwargs, out))
        return out

    def _entry(self, func: Any, traits: ops.Traits, args: Any, kwargs: Any, out: Any) -> Entry:
        if type(out) is Tensor and not traits.written:
            entry = Entry(func, [out.detach()], self._given(args))
            self._keep(out, entry, 0)
            return entry
        # What a draw writes to is somebody else's memory, which may be written again.
        wrote = [t.detach().clone() for t in written_tensors(traits, args, kwargs)]
        entry = Entry(func, [*wrote, *map(_detached, new_outputs(func, out))], self._given(args))
        for i, o in enumerate(entry.outputs[len(wrote) :], len(wrote)):
            if isinstance(o, Tensor):
                self._keep(o, entry, i)
        return entry

    def _keep(self, t: Tensor, entry: Entry, output: int) -> None:
        """If the memory of `t` is about to be overwritten, this output of the entry is copied first."""
        where = t.untyped_storage()._cdata if type(t) is Tensor else memory(t)
        if where in self._kept:
            self._kept[where].append((entry, output))
        else:
            self._kept[where] = [(entry, output)]

    def read(self, name: str, original: Callable[..., Any], t: Tensor, args: Any, kwargs: Any) -> Any:
        if not self.finished:
            self.tape.add(Entry(name, [t.detach().clone()]))
        if name != "tolist":
            self._protect(memory(t), t)  # it may be written to from there
        return original(t, *args, **kwargs)

    def _record_batch_norm(self, func: Any, traits: ops.Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # It is given copies of the running statistics, so the real ones only move when (and if) the step is replayed.
        running = args[3:5] if traits.running else ()
        kept = [r for r in running if r is not None]
        # Times one, which is a copy: one launch for all of them.
        copies = iter(torch._foreach_mul([*kept, *kept], 1) if kept else ())
        befores = [None if r is None else next(copies) for r in running]
        moved = [(before, None if before is None else next(copies)) for before in befores]
        out = batch_norm.forward(func, args, kwargs, [after for _, after in moved])
        self.tape.add(Entry(func, [out[1].detach(), out[2].detach()], self._given(args[1:3]), moved))
        return out

    def _protect(self, where: int, t: Tensor) -> None:
        super()._protect(where, t)
        if where in self._kept:
            for entry, i in self._kept.pop(where):
                entry.outputs[i] = entry.outputs[i].clone()

    def _refuse_in_checkpoint(self, func: Any) -> None:
        # torch.utils.checkpoint runs its part again in the backward pass, outside of any replay: another random draw,
        # other statistics. It shows as saved-tensor hooks that are not ours, or (reentrant) on Python's stack.
        if foreign_hooks() or (not torch.is_grad_enabled() and _in_reentrant_checkpoint()):
            self.tape.refuse(f"the shallow part runs {func} under torch.utils.checkpoint or other saved-tensor hooks")


def _in_reentrant_checkpoint() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def sequence(out: Any) -> list[Any]:
    """The outputs of an operation as a list."""
    return list(out) if isinstance(out, (tuple, list)) else [out]


def new_outputs(func: Any, out: Any) -> list[Any]:
    """The outputs of an operation that are not arguments which it has written to."""
    if not func._schema.is_mutable:
        return sequence(out)
    return [o for o, r in zip(sequence(out), func._schema.returns, strict=True) if r.alias_info is None]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
