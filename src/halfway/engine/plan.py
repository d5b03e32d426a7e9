"""Which part of a recorded output belongs to the retained samples, and how sure are we?

A recording holds the output of an operation on all N samples; a replay needs what the same operation would give on
S of them. Where the samples sit in that output is learned once, in a rehearsal, by running the operation on S
samples and comparing: the axis whose size changed from k N to k S holds the samples: sample by sample (windows, heads
and tokens of one sample side by side), or the other way round, or in between.

Shapes alone do not tell which, nor whether the operation mixes samples. So the values are compared too, and an
operation is only `proven` if the comparison could have failed: a zero-initialised branch gives equal rows for all
samples and would pass with any assignment, and so do rows that drop path has set to zero. Until it is proven, an
operation is computed, not replayed; for ever, if something that depends on other samples reaches it (see `axis`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batches import rows
from ..tables import columns
from .plain import Given, Plain

# How far two runs of one operation on different batch sizes may differ, relative to the output's norm.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
    torch.complex128: 1e-9,
    torch.complex64: 1e-4,
    torch.complex32: 5e-3,
}
_TOLERANCE_TF32 = 3e-3
# So many rows must have been compared where one comparison may agree by chance: behind a random draw, which can make a
# row the same for any sample (drop path), and outside of a rehearsal, where the rows may happen to lie symmetrically.
_ROWS_IN_DOUBT = 16
# Rows count as different when they are further apart than this many tolerances.
_MARGIN = 10
# Poolings that say where they found their maxima, and over how many dimensions they pool.
_POOLED = {
    torch.ops.aten.max_pool2d_with_indices.default: 2,
    torch.ops.aten.max_pool3d_with_indices.default: 3,
}


class RowLayout(NamedTuple):
    """Where the samples sit in a tensor: `dim` is (outer, samples, inner), flattened.

    Sample by sample (outer = 1, windows or tokens of one sample side by side), or the other way round (inner = 1), or
    in between.
    """

    dim: int
    outer: int = 1
    inner: int = 1

    def take(self, full: Tensor, indices: Tensor, size: int) -> Tensor:
        """The part of `full` (N samples) that belongs to `indices` (S,), in the same memory layout."""
        if self.outer == self.inner == 1:
            return rows.take(full, indices, self.dim)
        split = full.unflatten(self.dim, (self.outer, size, self.inner))
        return rows.take(split, indices, self.dim + 1).flatten(self.dim, self.dim + 2)

    def first(self, t: Tensor, size: int) -> Tensor:
        """`t` as (samples, everything else), for comparisons; complex numbers as pairs."""
        if t.is_complex():
            t = torch.view_as_real(t)
        return t.unflatten(self.dim, (self.outer, size, self.inner)).movedim(self.dim + 1, 0).flatten(1)


def possible_layouts(full: torch.Size, part: torch.Size, size: int, retained: int) -> list[RowLayout] | None:
    """Where the samples may sit, judging by shapes: [] nowhere (the shapes are equal), None: nothing fits."""
    if full == part:
        return []
    if len(full) != len(part):
        return None
    changed = [d for d in range(len(full)) if full[d] != part[d]]
    dim = changed[0]
    groups, rest = divmod(full[dim], size)
    if len(changed) > 1 or rest or groups * retained != part[dim]:
        return None
    splits = sorted((g for g in range(1, groups + 1) if groups % g == 0), key=lambda g: g not in (1, groups))
    return [RowLayout(dim, outer, groups // outer) for outer in splits]


def tolerance(t: Tensor) -> float:
    """How far outputs of this type may differ between batch sizes."""
    if t.dtype == torch.float32 and t.is_cuda:
        return _TOLERANCE_TF32 if _tf32() else _TOLERANCE[torch.float32]
    return _TOLERANCE.get(t.dtype, 0.0)


def _tf32() -> bool:
    try:
        return torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    except RuntimeError:  # set by the newer `fp32_precision`, after which these may not be read
        return True


def is_inexact(t: Tensor) -> bool:
    """Whether it holds numbers that are rounded: real or complex ones."""
    return t.is_floating_point() or t.is_complex()


def disagreement(a_SX: Tensor, b_SX: Tensor) -> Tensor:
    """Largest difference of a row, relative to the rows' norms: a scalar on the device."""
    a, b = a_SX.to(torch.promote_types(a_SX.dtype, torch.float32)), b_SX
    norm_S = a.norm(dim=1)
    return ((a - b).norm(dim=1) / (norm_S + norm_S.mean()).clamp_min(torch.finfo(a.dtype).tiny)).max()


def rows_differ(full_NX: Tensor, tol: float) -> bool:
    """Whether most samples differ from the next one by more than rounding could explain."""
    full = full_NX.to(torch.promote_types(full_NX.dtype, torch.float32))
    full = full.where(full.isfinite(), 0)
    norm_N = full.norm(dim=1)
    distance_N = (full - full.roll(1, 0)).norm(dim=1)
    return bool((distance_N > _MARGIN * tol * (norm_N + norm_N.mean())).float().mean() >= 0.5)


@dataclass
class Op:
    """What the rehearsal learned about one recorded operation.

    samples: for each output where its samples sit; None for one that is the same for every batch.
    proven: whether `samples` has been checked on values that could have contradicted it.
    computed: why it is always computed, if it is: its recording cannot be used, or something reaches it that depends
    on other samples (then `mixed`).
    behind_draws: whether random numbers were drawn before it. compared: rows that agreed so far.
    flops: of computing it on the retained samples.
    """

    func: Any
    layer: str
    kind: str = "expensive"
    shapes: tuple[torch.Size, ...] = ()
    samples: tuple[RowLayout | None, ...] = ()
    proven: bool = False
    computed: str = ""
    mixed: bool = False
    behind_draws: bool = False
    compared: int = 0
    attempts: int = 0
    flops: float = 0.0
    options: list[list[RowLayout]] = field(default_factory=list)

    def due(self) -> bool:
        """Whether an unproven operation should be checked again now. At first always, so that a training that was
        stopped and resumed proves it at the same step; then less and less often, it costs a sync."""
        self.attempts += 1
        return self.attempts <= 16 or self.attempts & (self.attempts - 1) == 0

    def prove(
        self,
        full: Sequence[Any],
        part: Sequence[Any],
        args: tuple[Any, ...],
        indices: Tensor,
        size: int,
        rehearsed: bool = False,
    ) -> str:
        """Compare a recording of N samples with the operation's outputs on S of them, where it is given `args`.

        Returns why the operation cannot be replayed, or "" (then `proven` says whether the check was conclusive).
        """
        conclusive = True
        chosen: list[RowLayout | None] = []
        layout: RowLayout | None = None
        for whole, computed, options in zip(full, part, self.options, strict=True):
            if not isinstance(whole, Tensor) or not options:
                chosen.append(None)
                continue
            if not is_inexact(whole):
                # Whole numbers cannot be compared within a tolerance: they lie as what was computed beside them.
                beside = layout._replace(dim=options[0].dim) if layout else None
                if beside not in options:
                    self.computed = "nothing shows whose its whole numbers are"
                    return ""
                taken = beside.take(whole, indices, size)
                if not torch.equal(taken, computed) and not self._same_maxima(args, part[0], taken):
                    self.computed = "its whole numbers depend on the place that a sample has in the batch"
                    return ""
                chosen.append(beside)
                continue
            tol = tolerance(whole)
            fitting = [s for s in options[:2] if _fits(s, whole, computed, indices, size, tol)]
            if not fitting:
                fitting = [s for s in options[2:] if _fits(s, whole, computed, indices, size, tol)]
            if not fitting:
                if not bool(whole.isfinite().all()):
                    return ""
                return (
                    f"{self.describe()} gives other values for a sample when other samples leave the batch: "
                    "the shallow part mixes or reorders samples"
                )
            conclusive &= len(fitting) == 1 and rows_differ(fitting[0].first(whole, size), tol)
            layout = fitting[0]
            chosen.append(fitting[0])
        self.samples = tuple(chosen)
        self.compared += len(indices) * conclusive
        in_doubt = self.behind_draws or not rehearsed
        self.proven = conclusive and (not in_doubt or self.compared >= _ROWS_IN_DOUBT)
        return ""

    def _same_maxima(self, args: tuple[Any, ...], maxima: Tensor, where: Tensor) -> bool:
        """Whether a max pooling on S samples might as well have found its maxima there: of two equal values, or two
        that rounding has made equal, either may be taken. A pooling across samples points elsewhere."""
        dims = _POOLED.get(self.func)
        if dims is None:
            return False
        planes, places = args[0].flatten(-dims), where.flatten(-dims)
        if planes.shape[:-1] != places.shape[:-1] or bool((places >= planes.shape[-1]).any()):
            return False
        found = planes.gather(-1, places)
        return bool(disagreement(maxima.flatten(1), found.view_as(maxima).flatten(1)) <= tolerance(maxima))

    def describe(self) -> str:
        return f"operation {self.func} in {self.layer!r}" if self.layer else f"operation {self.func}"


def _fits(samples: RowLayout, full: Tensor, part: Tensor, indices: Tensor, size: int, tol: float) -> bool:
    count = len(indices)
    a, b = samples.first(part, count), samples.first(samples.take(full, indices, size), count)
    # CUDA's fused attention fills the log-sum-exp up to a multiple of 32 tokens, with infinity.
    filled = (a == b) & a.isinf()
    return bool(disagreement(a.masked_fill(filled, 0), b.masked_fill(filled, 0)) <= tol)


@dataclass
class Plan:
    """How to replay one kind of step: a given batch size, ratio, input shape and program.

    program: all operations as they ran on N samples, cheap ones included; sequence: as they run on S.
    ops: what is known about those that are recorded, in order.
    refusal: why such steps cannot be replayed, if they cannot.
    places: where the samples may sit in the outputs of each operation of the program, if they are apart there.
    forced: operations of the program, by number, that were seen to mix samples.
    uneven: operations that are given other numbers or sizes on S samples than on N: what they are given.
    explained: what operations were given on N and on S samples in an earlier step, where `explains` said yes.
    undecided: whether a random draw did not show whose it was; another one may.
    mixed_features: why the features at the cut depend on other samples, if they do.
    """

    program: list[Any] = field(default_factory=list)
    sequence: list[Any] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    places: dict[int, list[list[RowLayout]]] = field(default_factory=dict)
    forced: set[int] = field(default_factory=set)
    uneven: dict[int, tuple[Plain, Plain]] = field(default_factory=dict)
    explained: dict[int, tuple[Given, Given]] = field(default_factory=dict)
    refusal: str = ""
    undecided: bool = False
    mixed_features: str = ""

    def explains(self, number: int, full: Plain, part: Plain) -> bool:
        """Whether it is known that an operation is given this on N samples and that on S."""
        if part.agrees(full):
            return True
        known = self.uneven.get(number)
        if known is None:
            return False
        # What follows it is computed if the numbers have differed before; they may differ in another way now.
        numbers_follow_the_batch = not known[1].same_numbers(known[0])
        if not numbers_follow_the_batch and not part.same_numbers(full):
            return False
        return full.sizes == part.sizes or (full.sizes, part.sizes) == (known[0].sizes, known[1].sizes)

    def spot(self, turn: int) -> int | None:
        """Which operation to recompute and compare, round robin; None if there is none to check."""
        checkable = [i for i, op in enumerate(self.ops) if op.proven]
        return checkable[turn % len(checkable)] if checkable else None

    def mixed(self) -> tuple[float, str]:
        """Which share of the FLOPs has to be computed because of other samples of the batch, and why."""
        found = [op for op in self.ops if op.mixed and op.flops]
        return (sum(op.flops for op in found) / self.flops(), found[0].computed) if found else (0.0, "")

    def flops(self) -> float:
        """Of computing all of it on the retained samples."""
        return sum(op.flops for op in self.ops)

    def explain(self) -> str:
        """A table of the recorded operations: replayed, or computed and why."""
        head = [f"steps like this one are computed, not replayed: {self.refusal}"] if self.refusal else []
        if self.mixed_features:
            head.append(f"the features at the cut depend on other samples of the batch: {self.mixed_features}")
        table = columns(("layer", "operation", "in a replay"), [_explained(op) for op in self.ops])
        return "\n".join([*head, table if self.ops else "no operation was recorded"])


_IN_A_REPLAY = {
    "random": "drawn once, for all samples",
    "batch_norm": "normalises with the statistics of all samples",
    "host": "read, and compared with what was read for all samples",
}


def _explained(op: Op) -> tuple[str, str, str]:
    layer, name = op.layer or "(the model itself)", str(op.func).removeprefix("aten.").removesuffix(".default")
    if op.computed:
        return layer, name, f"computed: {op.computed}"
    if op.kind in _IN_A_REPLAY:
        return layer, name, _IN_A_REPLAY[op.kind]
    return layer, name, "replayed" if op.proven else "computed until its rows have shown whose they are"
