"""Record a forward pass on all samples, replay it for some of them.

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
first difference the replay raises `Diverged`; the caller undoes what this pass has changed (both passes keep an undo
log of writes to parameters, buffers and inputs) and simply runs the model. Slower, never wrong. What a comparison of
programs cannot see (an operation that mixes samples) is found by comparing values: see `plan`.

Memory. A recorded output whose memory is about to be overwritten (`relu_` on a convolution's output) is copied first.
In the replay each entry of the tape is released as soon as it has been used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode, _get_current_dispatch_mode_stack

from . import batch_norm, kernels, ops
from .guard import Memory, Pass, address, foreign_hooks
from .plan import Op, Plan, Samples, candidates, disagreement

aten = torch.ops.aten


class Diverged(BaseException):
    """The replayed program is not the recorded one. A BaseException: no model's own `except` should swallow it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Entry:
    """One recorded operation.

    outputs: its outputs on all N samples; for BatchNorm mean and inverse standard deviation, for a host read the value.
    given: which parameters and buffers it was called with.
    moved: for BatchNorm, what the running mean and variance were and became; None for one it does not keep.
    """

    __slots__ = ("func", "given", "moved", "outputs")

    def __init__(self, func: Any, outputs: list[Any], given: tuple[Any, ...] = (), moved: Sequence[Any] = ()) -> None:
        self.func = func
        self.outputs = outputs
        self.given = given
        self.moved = moved


class Tape:
    """The recording of one probe of `size` samples. `refusal` says why it cannot be replayed, if it cannot."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.entries: list[Entry | None] = []
        self.refusal = ""

    def refuse(self, reason: str) -> None:
        """Nothing more needs to be kept, nor what was."""
        self.refusal = self.refusal or reason
        self.entries.clear()

    def add(self, entry: Entry) -> None:
        if not self.refusal:
            self.entries.append(entry)

    def signature(self) -> tuple[Any, ...]:
        """The recorded program: equal signatures can share a plan."""
        return tuple((e.func, *(_shape(o) for o in e.outputs)) for e in self.entries if e is not None)


class Recorder(Pass):
    """Runs everything, keeps what a replay will need."""

    def __init__(self, memory: Memory, size: int) -> None:
        super().__init__(memory)
        self.tape = Tape(size)
        self._kept: dict[int, list[tuple[Entry, int]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind, written, refusal = ops.traits(func)
        if refusal and not ops.excused(func, args):
            self.tape.refuse(refusal)
        if kind == "batch_norm" and batch_norm.trains(func, args, kwargs):
            self._refuse_in_checkpoint(func)
            return self._record_batch_norm(func, args, kwargs)
        if written and kind != "batch_norm":  # a frozen one only reads its running statistics
            self._before_write(written, args, kwargs)
        out = kernels.run(func, args, kwargs)
        if kind == "cheap" or kind == "batch_norm":
            if func is aten._to_copy.default:
                self._note_cast(args[0], out)
            return out
        if kind == "random":
            self._refuse_in_checkpoint(func)
        elif kind == "expensive" and ops.argument(func, "dropout_p", args, kwargs):
            self.tape.refuse(f"the shallow part uses fused attention with dropout ({func})")
        if self.tape.refusal:
            self._kept.clear()
            return out
        entry = Entry(func, [_detached(o) for o in _sequence(out)], self._given(args))
        for i, o in enumerate(entry.outputs):
            if isinstance(o, Tensor):
                self._kept.setdefault(address(o), []).append((entry, i))
        self.tape.add(entry)
        return out

    def _record_batch_norm(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # It is given copies of the running statistics, so the real ones only move when (and if) the step is replayed.
        running = args[3:5] if batch_norm.takes_running_statistics(func) else ()
        before = [None if r is None else r.clone() for r in running]
        after = [None if r is None else r.clone() for r in running]
        out = batch_norm.forward(func, args, kwargs, after)
        moved = list(zip(before, after, strict=True))
        self.tape.add(Entry(func, [out[1].detach(), out[2].detach()], self._given(args[1:3]), moved))
        return out

    def _protect(self, where: int) -> None:
        super()._protect(where)
        for entry, i in self._kept.pop(where, ()):
            entry.outputs[i] = entry.outputs[i].clone()

    def _refuse_in_checkpoint(self, func: Any) -> None:
        # torch.utils.checkpoint runs its part again in the backward pass, outside of any replay: another random draw,
        # other statistics. It shows as saved-tensor hooks that are not ours, or as a part that runs without grad.
        if not torch.is_grad_enabled() or foreign_hooks():
            self.tape.refuse(f"the shallow part runs {func} under torch.utils.checkpoint or no_grad")


class Replayer(Pass):
    """Answers expensive operations from the tape, cut to the retained rows.

    `spot` is one operation that is computed all the same; `mismatch` then holds how far the recording was off.
    """

    def __init__(self, memory: Memory, tape: Tape, plan: Plan, indices: Tensor, spot: int | None = None) -> None:
        super().__init__(memory)
        self.replayed = self.computed = 0
        self.mismatch: Tensor | None = None
        self._tape = tape
        self._plan = plan
        self._indices = indices
        self._spot = spot
        self._cursor = 0
        self._steps: list[tuple[Tensor, Tensor, Tensor, float]] = []
        self._over = False
        self._circumstances = contextlib.ExitStack()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """On the stack of modes until `leave`, or until an exception passes."""
        if self._indices.is_cuda:
            self._circumstances.enter_context(batch_norm.WithoutCudnn())
        self.__enter__()
        try:
            yield
        finally:
            self._circumstances.close()
            self._over = True
            if self in _get_current_dispatch_mode_stack():
                self.__exit__(None, None, None)

    def leave(self) -> None:
        """Let all operations pass. Off the stack at once if on top of it; another mode may have come to lie there."""
        self._circumstances.close()
        self._over = True
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._over:
            return func(*args, **kwargs)
        kind, written, _ = ops.traits(func)
        if kind == "batch_norm" and batch_norm.trains(func, args, kwargs):
            return self._normalise(func, args, kwargs)
        if written and kind != "batch_norm":
            self._before_write(written, args, kwargs)
        if kind == "cheap" or kind == "batch_norm":
            out = func(*args, **kwargs)
            if func is aten._to_copy.default:
                self._note_cast(args[0], out)
            return out
        entry, op = self._next(func)
        if entry.given != self._given(args):
            raise Diverged(f"{op.describe()} is given other parameters than in the probe")
        if kind == "host":
            value = func(*args, **kwargs)
            if not _same(value, entry.outputs[0]):
                raise Diverged("the shallow part branches on values of the batch")
            return value
        return (self._draw if kind == "random" else self._answer)(func, args, kwargs, entry, op)

    def finish(self) -> None:
        """The cut is reached: the whole tape must have been used. The running statistics take the step they took in
        the probe."""
        if self._cursor != len(self._tape.entries):
            raise Diverged("the shallow part runs fewer operations than in the probe")
        for step in self._steps:
            batch_norm.move(*step)

    def _next(self, func: Any) -> tuple[Entry, Op]:
        i, self._cursor = self._cursor, self._cursor + 1
        entry = self._tape.entries[i] if i < len(self._tape.entries) else None
        if entry is None or not _same_operation(entry.func, func):
            raise Diverged("the shallow part runs other operations than in the probe")
        self._tape.entries[i] = None
        return entry, self._plan.ops[i]

    def _answer(self, func: Any, args: Any, kwargs: Any, entry: Entry, op: Op) -> Any:
        if op.shapes != _shapes(args):
            raise Diverged(f"{op.describe()} has inputs of another shape than in the rehearsal")
        if op.proven and self._cursor - 1 != self._spot:
            self.replayed += 1
            return _like(func, self._cut(entry, op))
        self.computed += 1
        out = func(*args, **kwargs)
        if op.proven:
            taken, size = self._cut(entry, op), len(self._indices)
            pairs = [
                (s.first(a, size), s.first(b, size))
                for s, a, b in zip(op.samples, _sequence(out), taken, strict=True)
                if s
            ]
            self.mismatch = disagreement(*pairs[0])
            # Whether a step is checked must not show in its result.
            return _like(func, taken)
        if not op.always_compute and op.due():
            self._plan.refusal = op.prove(entry.outputs, _sequence(out), self._indices, self._tape.size)
            if self._plan.refusal:
                raise Diverged(self._plan.refusal)
        return out

    def _draw(self, func: Any, args: Any, kwargs: Any, entry: Entry, op: Op) -> Any:
        taken = self._cut(entry, op)
        if func._schema.is_mutable:
            if args[0].shape != taken[0].shape:
                raise Diverged(f"{op.describe()} draws another shape than in the rehearsal")
            return args[0].copy_(taken[0])
        return _like(func, taken)

    def _normalise(self, func: Any, args: Any, kwargs: Any) -> Any:
        entry, _ = self._next(func)
        mean, inverse_std = entry.outputs
        if entry.given != self._given(args[1:3]):
            raise Diverged("a BatchNorm is given other parameters than in the probe")
        if mean.numel() != args[0].shape[1]:
            # InstanceNorm presents its samples as channels: statistics of its own for each, nothing to hand over.
            self._before_write(ops.traits(func).written, args, kwargs)
            return func(*args, **kwargs)
        momentum = batch_norm.momentum(func, args, kwargs)
        self._steps += [(r, *m, momentum) for r, m in zip(args[3:5], entry.moved, strict=False) if m[0] is not None]
        return batch_norm.normalise(func, args, mean, inverse_std)

    def _cut(self, entry: Entry, op: Op) -> list[Any]:
        return [
            o if s is None else s.take(o, self._indices, self._tape.size)
            for o, s in zip(entry.outputs, op.samples, strict=True)
        ]


class Rehearsal(Replayer):
    """A replay that computes everything and learns from the comparison: fills the plan."""

    def __init__(self, memory: Memory, tape: Tape, plan: Plan, indices: Tensor, layer: Callable[[], str]) -> None:
        super().__init__(memory, tape, plan, indices)
        self._layer = layer
        self._drawn = False

    def _next(self, func: Any) -> tuple[Entry, Op]:
        i, self._cursor = self._cursor, self._cursor + 1
        op = Op(func, self._layer(), behind_draws=self._drawn)
        self._plan.ops.append(op)
        entry = self._tape.entries[i] if i < len(self._tape.entries) else None
        if entry is None or not _same_operation(entry.func, func):
            raise Diverged(f"the shallow part runs other operations on {len(self._indices)} samples ({op.describe()})")
        return entry, op

    def _answer(self, func: Any, args: Any, kwargs: Any, entry: Entry, op: Op) -> Any:
        out = func(*args, **kwargs)
        part = _sequence(out)
        self._locate(entry, op, part)
        op.shapes = _shapes(args)
        layouts_agree = all(
            s[0].take(o, self._indices, self._tape.size).stride() == p.stride()
            for o, p, s in zip(entry.outputs, part, op.options, strict=True)
            if s
        )
        if not op.options[0] or not layouts_agree:
            op.always_compute = True
            return out
        refusal = op.prove(entry.outputs, part, self._indices, self._tape.size, rehearsed=True)
        if refusal:
            raise Diverged(refusal)
        return _like(func, self._cut(entry, op)) if op.proven else out

    def _draw(self, func: Any, args: Any, kwargs: Any, entry: Entry, op: Op) -> Any:
        self._drawn = True
        part = _sequence(func(*args, **kwargs))
        self._locate(entry, op, part)
        # A draw cannot be repeated to see whose it was; the operations after it will tell if this was wrong.
        op.samples = tuple(s[0] if s else None for s in op.options)
        return super()._draw(func, args, kwargs, entry, op)

    def _locate(self, entry: Entry, op: Op, part: list[Any]) -> None:
        options: list[list[Samples]] = []
        for whole, computed in zip(entry.outputs, part, strict=True):
            found: list[Samples] | None = []
            if isinstance(whole, Tensor):
                found = candidates(whole.shape, computed.shape, self._tape.size, len(self._indices))
            if found is None:
                raise Diverged(
                    f"{op.describe()} gives {tuple(whole.shape)} for {self._tape.size} samples and "
                    f"{tuple(computed.shape)} for {len(self._indices)}: not one part per sample"
                )
            options.append(found)
        op.options = options


def _same_operation(recorded: Any, func: Any) -> bool:
    return recorded is func or (recorded in ops.BATCH_NORM and func in ops.BATCH_NORM)


def _sequence(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


def _like(func: Any, outputs: list[Any]) -> Any:
    return outputs[0] if len(func._schema.returns) == 1 else tuple(outputs)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else None


def _shapes(args: tuple[Any, ...]) -> tuple[torch.Size, ...]:
    return tuple(a.shape for a in args if isinstance(a, Tensor))


def _same(a: Any, b: Any) -> bool:
    return a == b or (a != a and b != b)
