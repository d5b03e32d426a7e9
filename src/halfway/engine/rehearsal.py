"""Find out, once for each program, which recordings belong to whom, and prove that samples do not see each other.

Three passes, which run the shallow part and leave no trace:

- The *rehearsal* runs it on S scattered samples. Each recorded operation is computed and compared with its recording:
  this shows where the samples sit in its output (see `plan`). On the way the sample axis is followed through all
  operations (see `axis`): what something of the whole batch reaches will be computed in every replay.
- The *swap* runs it on N samples again, once as they are and once with the S overwritten with copies of the others,
  with the random draws of the probe, its BatchNorm statistics and its host reads. What belongs to the others must not
  change, to the bit and in any operation, cheap ones included: same shapes, same kernels, same places. It needs no
  tolerance, so half precision hides nothing. Where something does change, samples are mixed from there on, and the
  rehearsal is repeated with that knowledge.

An extreme of the batch is either among the S samples, then the swap changes it, or among the others, then the rehearsal
lacks it. Mixing that no value shows today (a clamp that is not reached) is what the axis is followed for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import batch_norm, ops, plain
from .axis import Logged, Reading, SampleAxis, shapes_on_all
from .flops import flops_of
from .plain import Plain
from .plan import Op, Plan, RowLayout, is_inexact, possible_layouts
from .replay import Replayer, like, same_operation, shapes
from .sandbox import tensors_in, written_tensors
from .tape import Diverged, Entry, Tape, new_outputs, sequence

# So many places where samples may sit are told apart in operations that are not recorded.
_PLACES = 4
# For checksums: what spreads neighbouring positions over all bits, whole numbers by size, and how many at once.
_SPREAD = 0x1E3779B97F4A7C15
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 1 << 24


class Proving(Replayer):
    """A pass of ours, not the model's own call: it is taken back, also what runs after the cut. (The model may swallow
    what ends the pass.)"""

    def leave(self) -> None:
        self._over = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._over:
            return self._guarded(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)


class Rehearsal(Proving):
    """A replay that computes everything and learns from the comparison: fills the plan."""

    def __init__(
        self,
        inputs: list[Tensor],
        tape: Tape,
        plan: Plan,
        indices: Tensor,
        layer: Callable[[], str],
    ) -> None:
        super().__init__(inputs, tape, plan, indices)
        self._layer = layer
        self._drawn = False
        self._axis = SampleAxis(tape.size, len(indices), inputs, tape.owned, self.lasts)
        self._reading = Reading("", False, set(), None)
        self._logged: Logged | None = None

    def mixed(self, output: Any) -> str:
        """Why something of an output depends on other samples of the batch, or ""."""
        return self._axis.read(ops.HANDS_ON, (output,), {}).mixed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._over:
            return super().__torch_dispatch__(func, types, args, kwargs)
        traits = ops.traits(func)
        if traits.kind == "batch_norm":  # its statistics are not written to here
            traits = traits._replace(written=())
        self._reading = self._axis.read(traits, args, kwargs)
        self._logged = None
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self._reading.undecided and self._reading.mixed:
            raise self._failing(Diverged(f"nothing shows whose random numbers meet {self._reading.mixed}"))
        if traits.kind not in ("random", "host") and not self._normalised(func, args, kwargs, out):
            self._axis.follow(self._reading, traits, self._logged, args, kwargs, out, self._name(func))
        if traits.logged is not None and not self.mixed(out):
            self._note_places(traits, out)
        return out

    def _note_places(self, traits: ops.Traits, out: Any) -> None:
        """Where the samples sit in what the last operation gave: known for recorded ones, otherwise by shapes."""
        op = self._plan.ops[-1] if self._plan.ops and traits.kind == "expensive" else None
        if op is not None and op.samples:
            known = zip(sequence(out), op.samples, strict=True)
            places = [[s] if s else [] for o, s in known if isinstance(o, Tensor)]
        else:
            shapes = shapes_on_all(self._logged, out)
            found = [
                []
                if s is None or t.is_meta
                else possible_layouts(s, t.shape, self._tape.size, len(self._indices)) or []
                for t, s in zip(tensors_in(out), shapes, strict=True)
            ]
            places = [options[:_PLACES] for options in found]
        if any(places):
            self._plan.places[self._at - 1] = places

    def _normalised(self, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        """A BatchNorm hands on what it gets, with constants; in eval mode it is like any other operation."""
        traits = ops.traits(func)
        if traits.kind != "batch_norm" or not batch_norm.trains(traits, args, kwargs):
            return False
        for t in tensors_in(out):
            self._axis.keep(t, self._reading)
        return True

    def _step(self, func: Any, traits: ops.Traits, args: Any, kwargs: Any) -> None:
        i, self._at = self._at, self._at + 1
        self._plan.sequence.append(traits.logged)
        program = self._plan.program
        if i >= len(program) or not same_operation(program[i].func, traits.logged):
            raise Diverged(f"the shallow part runs other operations on {len(self._indices)} samples ({func})")
        self._logged = program[i]
        given = Plain.of(traits, plain.given(traits, args, kwargs))
        expected = Plain.of(traits, self._tape.plain[i])
        if not given.agrees(expected):
            self._plan.uneven[i] = expected, given
            if not given.same_numbers(expected):
                why = f"{self._name(func)}, which is given another number when there are fewer samples"
                if traits.kind == "random":
                    raise Diverged(f"random numbers are drawn by {why}")
                self._reading = self._reading._replace(mixed=self._reading.mixed or why)
        if i in self._plan.forced and not self._reading.mixed:
            why = f"{self._name(func)}, which gives other values for a sample when another one changes"
            self._reading = self._reading._replace(mixed=why)

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
        refusal = op.prove(entry.outputs, part, args, self._indices, self._tape.size, rehearsed=True)
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
        only_fills = traits.fills and all(any(t is w for w in written) for t in tensors_in((args, kwargs)))
        if self._reading.mixed and not only_fills:
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
        options: list[list[RowLayout]] = []
        for whole, computed in zip(entry.outputs, part, strict=True):
            found: list[RowLayout] | None = []
            if isinstance(whole, Tensor):
                found = possible_layouts(whole.shape, computed.shape, self._tape.size, len(self._indices))
            if found is None:
                raise Diverged(
                    f"{op.describe()} gives {tuple(whole.shape)} for {self._tape.size} samples and "
                    f"{tuple(computed.shape)} for {len(self._indices)}: not one part per sample"
                )
            options.append(found)
        op.options = options


class Swap(Proving):
    """All samples again, some of them overwritten with others; everything is computed.

    Args:
        indices: (N,) which sample stands at each place.
        untouched: the places that hold their own sample.
        expected: the checksums of a pass in which all places did; None: this is that pass.

    Attributes:
        sums: a checksum of each sample's part of each output, by number of the operation, for each place where the
            samples may sit.
    """

    def __init__(
        self,
        inputs: list[Tensor],
        tape: Tape,
        plan: Plan,
        indices: Tensor,
        untouched: Tensor,
        expected: dict[int, list[list[Tensor]]] | None,
    ) -> None:
        super().__init__(inputs, tape, plan, indices)
        self.sums: dict[int, list[list[Tensor]]] = {}
        self._untouched = untouched
        self._expected = expected
        self._changes: list[tuple[int, Tensor]] = []

    def changed(self) -> set[int]:
        """The operations that gave other values for samples that were left alone. Waits for the device."""
        if not self._changes:
            return set()
        flags = torch.stack([flag for _, flag in self._changes]).tolist()
        return {number for (number, _), flag in zip(self._changes, flags, strict=True) if flag}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        at = self._at
        out = super().__torch_dispatch__(func, types, args, kwargs)
        number = self._at - 1
        places = self._plan.places.get(number)
        if places is not None and self._at > at:
            size = self._tape.size
            found = zip(tensors_in(out), places, strict=True)
            sums = [[_checksum(s.first(t, size)) for s in options] for t, options in found]
            self.sums[number] = sums
            if self._expected is not None:
                self._compare(number, self._expected[number], sums)
        return out

    def _compare(self, number: int, before: list[list[Tensor]], now: list[list[Tensor]]) -> None:
        for was, became in zip(before, now, strict=True):
            if was:  # wherever the samples sit: if some place explains it, it is not mixed
                differ = [(a != b).index_select(0, self._untouched).any() for a, b in zip(was, became, strict=True)]
                self._changes.append((number, torch.stack(differ).all()))

    def read(self, name: str, original: Callable[..., Any], t: Tensor, args: Any, kwargs: Any) -> Any:
        if self._over:
            return original(t, *args, **kwargs)
        entry, _ = self._next(name, "host")
        return original(entry.outputs[0], *args, **kwargs)

    def _step(self, func: Any, traits: ops.Traits, args: Any, kwargs: Any) -> None:
        i, self._at = self._at, self._at + 1
        if i >= len(self._plan.program) or not same_operation(self._plan.program[i].func, traits.logged):
            raise Diverged(f"the shallow part runs other operations for other values ({func})")
        given = Plain.of(traits, plain.given(traits, args, kwargs))
        if not given.agrees(Plain.of(traits, self._tape.plain[i])):
            raise Diverged(f"the shallow part computes with other numbers for other values ({func})")

    def _next(self, func: Any, kind: str) -> tuple[Entry, Op]:
        i, self._cursor = self._cursor, self._cursor + 1
        entry = self._tape.entries[i] if i < len(self._tape.entries) else None
        if entry is None or not same_operation(entry.func, func):
            raise Diverged(f"the shallow part runs other operations for other values ({func})")
        return entry, self._plan.ops[i]

    def _host(self, func: Any, args: Any, kwargs: Any, entry: Entry) -> Any:
        return entry.outputs[0]

    def _answer(self, func: Any, args: Any, kwargs: Any, entry: Entry, op: Op) -> Any:
        return func(*args, **kwargs)


def _checksum(part_NX: Tensor) -> Tensor:
    """(N,) a number for each row that changes with any of its bits (but for one chance in 2^63 or so)."""
    rows = (part_NX.to(torch.uint8) if part_NX.dtype == torch.bool else part_NX).contiguous()
    if rows.storage_offset():
        rows = rows.clone()
    if rows.shape[1] * rows.element_size() % 8 == 0 and rows.numel():
        rows = rows.view(torch.int64)
    else:
        rows = rows.view(_BITS[rows.element_size()])
    weights = torch.arange(1, rows.shape[1] + 1, device=rows.device) * _SPREAD
    weights = (weights ^ (weights >> 31)) | 1
    few = max(1, _AT_ONCE // max(1, rows.shape[1]))
    return torch.cat([(some * weights).sum(1) for some in rows.split(few)])


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
