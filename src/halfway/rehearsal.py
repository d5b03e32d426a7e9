"""Find out, once for each program, which recordings belong to whom, and prove that samples do not see each other.

Two passes, which run the shallow part and leave no trace:

- The *rehearsal* runs it on S scattered samples. Each recorded operation is computed and compared with its recording:
  this shows where the samples sit in its output (see `plan`). On the way the sample axis is followed through all
  operations (see `axis`): what something of the whole batch reaches will be computed in every replay.
- The *swap* runs it on N samples again, of which the S have been overwritten with copies of the others, with the same
  random draws, the same BatchNorm statistics, the same values read on the host. What belongs to the others must not
  change, to the bit: same shapes, same kernels, same places. It needs no tolerance, so half precision hides nothing.

An extreme of the batch is either among the S samples, then the swap changes it, or among the others, then the rehearsal
lacks it. Mixing that no value shows today (a clamp that is not reached) is what the axis is followed for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import batch_norm, kernels, ops
from .axis import Logged, Reading, SampleAxis
from .flops import flops_of
from .plan import Op, Plan, Samples, candidates, is_inexact
from .replay import Replayer, like, same_operation, shapes
from .sandbox import tensors_in, written_tensors
from .tape import Diverged, Entry, Tape, new_outputs, sequence


class Rehearsal(Replayer):
    """A replay that computes everything and learns from the comparison: fills the plan."""

    def __init__(
        self,
        inputs: list[Tensor],
        owned: set[int],
        tape: Tape,
        plan: Plan,
        indices: Tensor,
        layer: Callable[[], str],
    ) -> None:
        super().__init__(inputs, owned, tape, plan, indices)
        self._layer = layer
        self._drawn = False
        self._axis = SampleAxis(tape.size, len(indices), inputs, self.lasts)
        self._reading = Reading("", False, set(), None)
        self._logged: Logged | None = None

    def mixed(self, output: Any) -> str:
        """Why something of an output depends on other samples of the batch, or ""."""
        return self._axis.read(ops.traits(torch.ops.aten.detach.default), (output,), {}).mixed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._over:
            return func(*args, **kwargs)
        traits = ops.traits(func)
        if traits.kind == "batch_norm":  # its statistics are not written to here
            traits = traits._replace(written=())
        self._reading = self._axis.read(traits, args, kwargs)
        self._logged = None
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if traits.kind not in ("random", "host") and not self._normalised(func, args, kwargs, out):
            self._axis.follow(self._reading, traits, self._logged, args, kwargs, out, self._name(func))
        return out

    def _normalised(self, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        """A BatchNorm hands on what it gets, with constants; in eval mode it is like any other operation."""
        if func not in ops.BATCH_NORM or not batch_norm.trains(func, args, kwargs):
            return False
        for t in tensors_in(out):
            self._axis.keep(t, args[0])
        return True

    def _step(self, func: Any, traits: ops.Traits) -> None:
        i, self._at = self._at, self._at + 1
        self._plan.sequence.append(traits.logged)
        program = self._plan.program
        if i >= len(program) or not same_operation(program[i].func, traits.logged):
            raise Diverged(f"the shallow part runs other operations on {len(self._indices)} samples ({func})")
        self._logged = program[i]

    def _next(self, func: Any, kind: str) -> tuple[Entry, Op]:
        i, self._cursor = self._cursor, self._cursor + 1
        mixed = self._reading.mixed if kind == "batch_norm" else ""
        op = Op(func, self._layer(), kind, computed=mixed, behind_draws=self._drawn)
        self._plan.ops.append(op)
        entry = self._tape.entries[i] if i < len(self._tape.entries) else None
        if entry is None or not same_operation(entry.func, func):
            raise Diverged(f"the shallow part runs other operations on {len(self._indices)} samples ({op.describe()})")
        return entry, op

    def _name(self, func: Any) -> str:
        layer = self._layer()
        return f"{func} in {layer!r}" if layer else str(func)

    def _answer(self, func: Any, args: Any, kwargs: Any, entry: Entry, op: Op) -> Any:
        out = func(*args, **kwargs)
        part = sequence(out)
        op.shapes = shapes(args)
        op.flops = flops_of(func, args, kwargs, out)
        op.computed = self._mixed_output(func, out)
        if op.computed:
            op.mixed = True
            return out
        self._locate(entry, op, part)
        layouts_agree = all(
            s[0].take(o, self._indices, self._tape.size).stride() == p.stride()
            for o, p, s in zip(entry.outputs, part, op.options, strict=True)
            if s
        )
        if not op.options[0]:
            op.computed = "it does not depend on the batch"
        elif not layouts_agree:
            op.computed = "its memory layout depends on the number of samples"
        if op.computed:
            return out
        refusal = op.prove(entry.outputs, part, self._indices, self._tape.size, rehearsed=True)
        if refusal:
            raise Diverged(refusal)
        return like(func, self._cut(entry, op)) if op.proven else out

    def _mixed_output(self, func: Any, out: Any) -> str:
        reasons = self._axis.judge(self._reading, ops.traits(func), self._logged, out, self._name(func))
        # Not of the random state that fused attention returns beside its output.
        return next((why for t, why in zip(tensors_in(out), reasons, strict=True) if why and is_inexact(t)), "")

    def _draw(self, func: Any, traits: ops.Traits, args: Any, kwargs: Any, entry: Entry, op: Op) -> Any:
        self._drawn = True
        written = list(written_tensors(traits, args, kwargs))
        fills = all(any(t is w for w in written) for t in tensors_in((args, kwargs)))
        if self._reading.mixed and not fills:
            raise Diverged(
                f"{op.describe()} draws random numbers from values that depend on other samples ({self._reading.mixed})"
            )
        drawn = func(*args, **kwargs)
        part = [*written, *new_outputs(func, drawn)]
        self._locate(entry, op, part)
        # A draw cannot be repeated to see whose it was. The swap will tell if this was wrong, provided that it makes
        # a difference to this draw.
        op.samples = tuple(s[0] if s else None for s in op.options)
        self._plan.undecided |= any(
            len(s) > 1 and _equal(*(places.take(o, self._indices, self._tape.size) for places in s[:2]))
            for o, s in zip(entry.outputs, op.options, strict=True)
        )
        out = super()._draw(func, traits, args, kwargs, entry, op)
        self._axis.drawn([*written, *new_outputs(func, out)], [o.shape for o in entry.outputs])
        return out

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


class Swap(Replayer):
    """All samples again, some of them overwritten with others; everything is computed.

    Args:
        indices: (N,) which sample stands at each place.
        untouched: the places that hold their own sample.
        expected: what the recorded operations gave before, by their numbers; None: this pass finds out (`outputs`).
    """

    def __init__(
        self,
        inputs: list[Tensor],
        owned: set[int],
        tape: Tape,
        plan: Plan,
        indices: Tensor,
        untouched: Tensor,
        expected: dict[int, list[Any]] | None,
    ) -> None:
        super().__init__(inputs, owned, tape, plan, indices)
        self.outputs: dict[int, list[Any]] = {}
        self._untouched = untouched
        self._expected = expected
        self._changes: list[tuple[Op, Tensor]] = []

    def changed(self) -> list[Op]:
        """The operations that gave other values for samples that were left alone. Waits for the device."""
        if not self._changes:
            return []
        flags = torch.stack([flag for _, flag in self._changes]).tolist()
        return [op for (op, _), flag in zip(self._changes, flags, strict=True) if flag]

    def read(self, name: str, original: Callable[..., Any], t: Tensor, args: Any, kwargs: Any) -> Any:
        entry, _ = self._next(name, "host")
        return original(entry.outputs[0], *args, **kwargs)

    def _step(self, func: Any, traits: ops.Traits) -> None:
        i, self._at = self._at, self._at + 1
        if i >= len(self._plan.program) or not same_operation(self._plan.program[i].func, traits.logged):
            raise Diverged(f"the shallow part runs other operations for other values ({func})")

    def _next(self, func: Any, kind: str) -> tuple[Entry, Op]:
        i, self._cursor = self._cursor, self._cursor + 1
        entry = self._tape.entries[i] if i < len(self._tape.entries) else None
        if entry is None or not same_operation(entry.func, func):
            raise Diverged(f"the shallow part runs other operations for other values ({func})")
        return entry, self._plan.ops[i]

    def _host(self, func: Any, args: Any, kwargs: Any, entry: Entry) -> Any:
        return entry.outputs[0]

    def _answer(self, func: Any, args: Any, kwargs: Any, entry: Entry, op: Op) -> Any:
        out = kernels.run(func, args, kwargs)
        if op.computed:
            return out
        found, number = sequence(out), self._cursor - 1
        if self._expected is None:
            self.outputs[number] = [o.detach().clone() if isinstance(o, Tensor) else o for o in found]
            return out
        for samples, before, now in zip(op.samples, self._expected[number], found, strict=True):
            if samples is not None:
                parts = (samples.take(t, self._untouched, self._tape.size) for t in (before, now))
                self._changes.append((op, ~_bits_equal(*parts)))
        return out


def _bits_equal(a: Tensor, b: Tensor) -> Tensor:
    return ((a == b) | ((a != a) & (b != b))).all()


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(_bits_equal(a, b))
