"""Replay a tape for some of its samples. (`tape` tells the whole story.)"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode, _get_current_dispatch_mode_stack

from . import batch_norm, ops, plain
from .flops import Meter
from .plain import Plain
from .plan import Op, Plan, disagreement
from .sandbox import NO_TENSORS, Pass, written_tensors
from .sharding import memory
from .tape import Diverged, Entry, Tape, sequence

aten = torch.ops.aten

OTHER_VALUES = "the shallow part branches on values of the batch"


class Replayer(Pass):
    """Answers expensive operations from the tape, cut to the retained rows.

    `spot` is one operation that is computed all the same; `mismatch` then holds how far the recording was off. A
    `meter` is told of operations that were answered. If it is `open_ended`, more may follow than was recorded: a model
    that is given labels goes on to its loss.
    """

    def __init__(
        self,
        inputs: list[Tensor],
        tape: Tape,
        plan: Plan,
        indices: Tensor,
        spot: int | None = None,
    ) -> None:
        super().__init__(inputs, tape.owned)
        self.replayed = self.computed = 0
        self.computed_flops = 0.0
        self.mismatch: Tensor | None = None
        self.meter: Meter | None = None
        self.open_ended = False
        self._tape = tape
        self._plan = plan
        self._indices = indices
        self._spot = spot
        self._length, self._recorded = len(plan.sequence), len(tape.entries)
        self._at = 0
        self._cursor = 0
        self._steps: list[batch_norm.Step] = []
        self._over = False
        self._failure: Diverged | None = None
        self._circumstances = contextlib.ExitStack()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """On the stack of modes until `leave`, or until an exception passes."""
        if self._indices.is_cuda:
            self._circumstances.enter_context(batch_norm.WithoutCudnn(self._recorded_next))
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
        if self.open_ended and self._at == len(self._plan.sequence) and self._cursor == len(self._tape.entries):
            return self._guarded(func, args, kwargs)
        try:
            traits = ops.KNOWN[id(func)]
        except KeyError:
            traits = ops.traits(func)
        try:
            if traits.logged is not None:
                self._step(func, traits, args, kwargs)
            out = self._run(func, traits, args, kwargs)
        except Diverged as difference:
            raise self._failing(difference) from None
        if traits.fresh:
            if type(out) is Tensor:
                self._born.add(out.untyped_storage()._cdata)
            else:
                self._note_birth(out[:1] if traits.kind == "batch_norm" else out)
        return out

    def _failing(self, difference: Diverged) -> Diverged:
        """What has once diverged goes on to do so, with its first reason: NumPy's conversions swallow any error."""
        self._failure = self._failure or difference
        return self._failure

    def _step(self, func: Any, traits: ops.Traits, args: Any, kwargs: Any) -> None:
        """One operation further in the program; it must be the one that was rehearsed."""
        i, self._at = self._at, self._at + 1
        if i >= self._length or self._plan.sequence[i] is not traits.logged:
            raise Diverged("the shallow part runs other operations than in the probe")
        given = plain.given(traits, args, kwargs) if traits.plain or kwargs else plain.NOTHING
        expected = self._tape.plain[i]
        if given != expected:
            self._explain(i, func, traits, expected, given)

    def _explain(self, i: int, func: Any, traits: ops.Traits, expected: plain.Given, given: plain.Given) -> None:
        """Operation i is given something else than for all samples: raise, unless the plan knows why."""
        known = self._plan.explained
        if i in known and known[i] == (expected, given):  # the same as in an earlier step
            return
        if not self._plan.explains(i, Plain.of(traits, expected), Plain.of(traits, given)):
            raise Diverged(f"{func} is given other numbers for {len(self._indices)} samples than for {self._tape.size}")
        if not traits.from_host:  # these compare as equal if their shapes differ
            known[i] = expected, given

    def _run(self, func: Any, traits: ops.Traits, args: Any, kwargs: Any) -> Any:
        kind = traits.kind
        if kind == "batch_norm" and batch_norm.trains(traits, args, kwargs):
            return self._normalise(func, traits, args, kwargs)
        if traits.written and kind != "batch_norm":
            self._before_write(traits, args, kwargs)
        if kind == "cheap" or kind == "batch_norm":
            out = func(*args, **kwargs)
            if func is aten._to_copy.default:
                self._note_cast(args[0], out)
            return out
        entry, op = self._next(func, kind)
        if kind == "host":
            return self._host(func, args, kwargs, entry)
        if entry.given != self._given(args):
            raise Diverged(f"{op.describe()} is given other parameters than in the probe")
        if kind == "random":
            self._before_draw(func, args, kwargs)
            return self._draw(func, traits, args, kwargs, entry, op)
        return self._answer(func, args, kwargs, entry, op)

    def read(self, name: str, original: Callable[..., Any], t: Tensor, args: Any, kwargs: Any) -> Any:
        if self._over:
            return original(t, *args, **kwargs)
        try:
            entry, _ = self._next(name, "host")
            expected = entry.outputs[0]
            if t.shape != expected.shape or t.dtype != expected.dtype or not plain.same_values(t, expected):
                raise Diverged(OTHER_VALUES)
        except Diverged as difference:
            raise self._failing(difference) from None
        if name != "tolist":
            self._protect(memory(t), t)
        return original(t, *args, **kwargs)

    def _host(self, func: Any, args: Any, kwargs: Any, entry: Entry) -> Any:
        value = func(*args, **kwargs)
        if not plain.same(value, entry.outputs[0]):
            raise Diverged(OTHER_VALUES)
        return value

    def finish(self) -> None:
        """The cut is reached: the whole tape must have been used."""
        if self._cursor != len(self._tape.entries) or self._at != len(self._plan.sequence):
            self._failing(Diverged("the shallow part runs fewer operations than in the probe"))
        self.check()

    def check(self) -> None:
        """Raise again what was raised before, and may have been swallowed by the model."""
        if self._failure is not None:
            raise self._failure

    def move_statistics(self) -> None:
        """Running statistics take the step they took in the probe."""
        batch_norm.move(self._steps)

    def _next(self, func: Any, kind: str) -> tuple[Entry, Op]:
        i, self._cursor = self._cursor, self._cursor + 1
        entry = self._tape.entries[i] if i < self._recorded else None
        if entry is None or (entry.func is not func and not same_operation(entry.func, func)):
            raise Diverged("the shallow part runs other operations than in the probe")
        self._tape.entries[i] = None
        return entry, self._plan.ops[i]

    def _recorded_next(self) -> Any:
        entry = self._tape.entries[self._cursor] if self._cursor < self._recorded else None
        return None if entry is None else entry.func

    def _answer(self, func: Any, args: Any, kwargs: Any, entry: Entry, op: Op) -> Any:
        if op.shapes != shapes(args):
            raise Diverged(f"{op.describe()} has inputs of another shape than in the rehearsal")
        if op.proven and self._cursor - 1 != self._spot:
            self.replayed += 1
            answer = like(func, self._cut(entry, op))
            if self.meter is not None:
                self.meter.count(func, args, kwargs, answer)
            return answer
        self.computed += 1
        out = func(*args, **kwargs)
        if op.proven:
            taken, size = self._cut(entry, op), len(self._indices)
            pairs = [
                (s.first(a, size), s.first(b, size))
                for s, a, b in zip(op.samples, sequence(out), taken, strict=True)
                if s
            ]
            self.mismatch = disagreement(*pairs[0])
            # Whether a step is checked must not show in its result.
            return like(func, taken)
        self.computed_flops += op.flops
        if not op.computed and op.due():
            self._plan.refusal = op.prove(entry.outputs, sequence(out), args, self._indices, self._tape.size)
            if self._plan.refusal:
                raise Diverged(self._plan.refusal)
        return out

    def _draw(self, func: Any, traits: ops.Traits, args: Any, kwargs: Any, entry: Entry, op: Op) -> Any:
        taken = self._cut(entry, op)
        written = list(written_tensors(traits, args, kwargs))
        if not written:
            return like(func, taken)
        for t, value in zip(written, taken, strict=False):
            if t.shape != value.shape:
                raise Diverged(f"{op.describe()} draws another shape than in the rehearsal")
            t.copy_(value)
        new = iter(taken[len(written) :])
        old = iter(written)
        return like(func, [next(new) if r.alias_info is None else next(old) for r in func._schema.returns])

    def _normalise(self, func: Any, traits: ops.Traits, args: Any, kwargs: Any) -> Any:
        entry, op = self._next(func, "batch_norm")
        mean, inverse_std = entry.outputs
        if entry.given != self._given(args[1:3]):
            raise Diverged("a BatchNorm is given other parameters than in the probe")
        if op.computed or mean.numel() != args[0].shape[1]:
            # What it normalises depends on other samples already; or it is InstanceNorm, which presents its samples
            # as channels: statistics of its own for each, nothing to hand over.
            self._before_write(traits, args, kwargs)
            return func(*args, **kwargs)
        momentum = batch_norm.momentum(traits, args, kwargs)
        for running, (before, after) in zip(args[3:5], entry.moved, strict=False):
            if before is not None:
                self._steps.append(batch_norm.Step(running, before, after, momentum))
        return batch_norm.normalise(func, args, mean, inverse_std)

    def _cut(self, entry: Entry, op: Op) -> list[Any]:
        return [
            o if s is None else s.take(o, self._indices, self._tape.size)
            for o, s in zip(entry.outputs, op.samples, strict=True)
        ]


def same_operation(recorded: Any, func: Any) -> bool:
    """Whether two operations are one; cuDNN's BatchNorm and PyTorch's own are."""
    return recorded is func or recorded == func or (recorded in ops.BATCH_NORM and func in ops.BATCH_NORM)


def like(func: Any, outputs: list[Any]) -> Any:
    """The outputs in the form in which the operation returns them."""
    return tuple(outputs) if ops.traits(func).several else outputs[0]


def shapes(args: tuple[Any, ...]) -> tuple[torch.Size, ...]:
    return tuple([a.shape for a in args if type(a) not in NO_TENSORS and isinstance(a, Tensor)])
