"""What a cut saves, before any training: FLOPs counted on one forward pass.

Let T be the FLOPs of a training step per sample (forward and backward) and F those of the shallow forward. With
probe and replay a pruned sample pays F, a retained one T: a step costs (1 - p) + p F/T of full training. A run saves
less than a step, since the first and last epochs prune nothing: every table has both columns.

Counted is what torch has a formula for: convolutions, matrix products and fused attention. Fused recurrent kernels
are not among them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count, flop_registry

from . import batch, ops
from .guard import Guard, Memory
from .schedule import Schedule
from .snapshot import Attributes, HostRandom, TorchRandom

aten = torch.ops.aten
# Backward FLOPs of fused attention per forward FLOP: five products of which one repeats the forward, against two.
_ATTENTION_BACKWARD = 2.5
# The prune ratios of a table's columns.
RATIOS = (0.3, 0.5, 0.7)


# -------------------------------------------------------------------- counting


class FlopCounter(TorchDispatchMode):
    """Counts the FLOPs of everything that really runs, a backward pass included: `total`.

    Like torch's FlopCounterMode, but right for the backward pass of grouped convolutions, where torch forgets the
    groups (a depthwise one of 64 channels counts 64-fold), and for the CPU's fused attention in old versions.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += _flops(func, args, kwargs or {}, out)
        return out


class Meter(TorchDispatchMode):
    """Counts the FLOPs of a forward pass, of its part up to the cut, and of the backward pass it implies.

    The backward pass of a product or convolution costs its forward once for every operand that needs a gradient, so
    frozen layers, and the first layer, are counted for what they cost.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.forward = 0.0
        self.backward = 0.0
        self._shallow = 0.0

    def reached_cut(self) -> None:
        """Called when the forward pass leaves the cut."""
        self._shallow = self.forward

    @property
    def shallow_share(self) -> float:
        """F/T: the shallow forward relative to the whole training step; 0 if nothing was counted."""
        return self.share(self._shallow)

    def share(self, flops: float) -> float:
        """`flops` relative to the whole training step; 0 if nothing was counted."""
        total = self.forward + self.backward
        return flops / total if total else 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        flops = _flops(func, args, kwargs or {}, out)
        if flops:
            self.forward += flops
            self.backward += flops * _backward_factor(func, args)
        return out


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    if func is aten.convolution_backward.default:
        return _convolution_backward(*args, **kwargs)
    packet: Any = getattr(func, "_overloadpacket", None)
    # torch 2.6 does not know the CPU's fused attention yet; it counts like the others.
    formula = flop_registry.get(packet) or flop_registry.get(_SAME_AS.get(packet))
    return float(formula(*args, **kwargs, out_val=out)) if formula else 0.0


_SAME_AS = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


def _convolution_backward(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
) -> float:
    """Each of the two gradients takes part in the same multiplications as the forward pass did."""
    forward = conv_flop_count(x.shape, weight.shape, grad_out.shape, transposed=transposed)  # type: ignore[arg-type]
    return float(forward * sum(output_mask[:2]))


def _backward_factor(func: Any, args: tuple[Any, ...]) -> float:
    if not torch.is_grad_enabled():
        return 0.0
    operands = [a.requires_grad for a in args if isinstance(a, Tensor)]
    if "attention" in str(func):
        return _ATTENTION_BACKWARD if any(operands) else 0.0
    if func in (aten.addmm.default, aten.baddbmm.default, aten.addmv.default):
        operands = operands[1:]
    return float(sum(operands[:2]))


# ------------------------------------------------------------------ what a cut costs


@dataclass(frozen=True)
class Cost:
    """Cost relative to full training (1.0 is training on all samples).

    shallow_share: F/T, the shallow forward relative to a whole training step of one sample.
    step: one step in which samples are pruned. run: a whole run, with the epochs in which none are.
    """

    shallow_share: float
    step: float
    run: float


def relative_cost(shallow_share: float, ratio: float, *, replayed: bool = True) -> float:
    """Cost of a step that prunes `ratio` of its samples: (1 - p) + p F/T replayed, (1 - p) + F/T recomputed."""
    return 1 - ratio + shallow_share * (ratio if replayed else 1.0)


def cost(
    model: nn.Module,
    at: str | nn.Module,
    prune_ratio: float,
    *example: Any,
    schedule: Schedule | None = None,
    length: int | None = None,
) -> Cost:
    """What blocking at a layer will cost, relative to training on all samples. Nothing is trained.

    One forward pass is counted, in the mode (train or eval) the model is in, and leaves no trace.

    Args:
        model: any module; wrappers (DDP, torch.compile) are looked through.
        at: the cut, a submodule or its name.
        prune_ratio: p, in [0, 1), taken as it is. (A batch prunes a whole number of samples: `stats` tells the
            effective ratio of a training.)
        *example: the model's positional inputs, batch first; or one dict, its keyword inputs. One or two samples do.
        schedule: when samples are pruned; None: always.
        length: of the run, in the schedule's unit.
    """
    from .blocker import _find_layer, _unwrap

    if not 0 <= prune_ratio < 1:
        raise ValueError(f"prune_ratio is the share of samples to prune and must be in [0, 1), got {prune_ratio}")
    pruned_share = _pruned_share(schedule, length)
    name, layer = _find_layer(_unwrap(model)[0], at)
    meter, visits = Meter(), []

    def at_cut(module: nn.Module, args: Any, output: Any) -> None:
        visits.append(name)
        meter.reached_cut()

    handle = layer.register_forward_hook(at_cut)
    try:
        _run(model, example, meter)
    finally:
        handle.remove()
    if len(visits) != 1:
        how = f"runs {len(visits)} times" if visits else "never runs"
        raise ValueError(
            f"layer {name!r} {how} in the model's forward pass, so it is no place to cut; choose one that runs once "
            "(`halfway layers` lists them)"
        )
    return _cost(meter.shallow_share, prune_ratio, pruned_share)


def _cost(shallow_share: float, prune_ratio: float, pruned_share: float) -> Cost:
    step = relative_cost(shallow_share, prune_ratio)
    return Cost(shallow_share, step, pruned_share * step + (1 - pruned_share))


def _pruned_share(schedule: Schedule | None, length: int | None) -> float:
    if schedule is None:
        return 1.0
    if length is None:
        raise ValueError(f"the cost of a run with {schedule} depends on its length: pass length=, in {schedule.unit}s")
    return schedule.share(length)


def _run(model: nn.Module, example: tuple[Any, ...], mode: TorchDispatchMode) -> None:
    """One forward pass under `mode` that leaves no trace: weights, buffers, inputs, attributes, random generators."""
    from .blocker import _unwrap

    root, compiled = _unwrap(model)
    args, kwargs = _arguments(example)
    batch.length((args, kwargs))  # complains if there is no tensor
    modules = list(root.modules())
    tensors = [leaf for leaf in batch.leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    device = tensors[0].device
    guard = Guard(Memory((t for t in (*root.parameters(), *root.buffers())), tensors))
    attributes, host_random = Attributes(modules), HostRandom()
    # The meta device computes nothing and has no generator.
    torch_random = TorchRandom(torch.device("cpu") if device.type == "meta" else device)
    try:
        with contextlib.ExitStack() as stack:
            if compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            torch.clear_autocast_cache()
            stack.callback(torch.clear_autocast_cache)
            # With grad, so that it shows what needs one; nothing is saved for a backward pass that will never come.
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_drop, _unavailable))
            stack.enter_context(guard)  # below `mode`, which then does not see the guard's own copying
            stack.enter_context(mode)
            root(*args, **kwargs)
    finally:
        guard.undo()
        attributes.restore()
        host_random.restore()
        torch_random.restore()


def _arguments(example: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(example) == 1 and isinstance(example[0], Mapping):
        return (), dict(example[0])
    return example, {}


def _drop(t: Tensor) -> None:
    return None


def _unavailable(packed: Any) -> Tensor:
    raise RuntimeError("halfway: no backward pass through a metered forward pass")


# ------------------------------------------------------------------- which cuts there are


@dataclass(frozen=True)
class Layer:
    """A place to cut.

    name: what to pass as `at`. type: of the module.
    output_shape: of one sample, without the batch axis.
    shallow_share: F/T. pruned_share: the part of a run in which samples are pruned.
    """

    name: str
    type: str
    output_shape: tuple[int, ...]
    shallow_share: float
    pruned_share: float

    def cost(self, prune_ratio: float) -> Cost:
        """The cost of cutting here and pruning this share of the samples."""
        return _cost(self.shallow_share, prune_ratio, self.pruned_share)


class Layers(Sequence[Layer]):
    """The sensible cuts of a model, from shallow to deep. Prints as a table."""

    def __init__(self, rows: Sequence[Layer], model: str, schedule: Schedule | None, length: int | None) -> None:
        self._rows = tuple(rows)
        self.model = model
        self.schedule = schedule
        self.length = length

    @overload
    def __getitem__(self, i: int) -> Layer: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Layer]: ...
    def __getitem__(self, i: int | slice) -> Layer | Sequence[Layer]:
        return self._rows[i]

    def __len__(self) -> int:
        return len(self._rows)

    def __str__(self) -> str:
        if not self._rows:
            return f"{self.model}: no layer runs once per forward pass and returns one tensor with the batch first"
        header = ["cut", "module", "output", "F/T", *(f"p={p}" for p in RATIOS)]
        explained = "step: a step in which samples are pruned"
        if self.schedule is not None:
            header += [f"run p={p}" for p in RATIOS]
            stop = self.length if self.schedule.stop is None else self.schedule.stop
            unit = self.schedule.unit
            explained += f"; run: {self.length} {unit}s, pruned in [{self.schedule.start}, {stop})"
        return (
            f"{self.model}: cost relative to training on all samples (1.000), in FLOPs, pruning the share p\n"
            f"F/T: shallow forward / whole training step; {explained}\n\n"
            + columns(header, map(self._cells, self._rows))
        )

    __repr__ = __str__

    def _cells(self, row: Layer) -> list[str]:
        costs = [row.cost(p) for p in RATIOS]
        numbers = [row.shallow_share, *(c.step for c in costs)]
        if self.schedule is not None:
            numbers += [c.run for c in costs]
        return [row.name, row.type, "x".join(map(str, row.output_shape)), *(f"{n:.3f}" for n in numbers)]


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines of aligned text: words to the left, numbers to the right."""
    body = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in (header, *body)) for i in range(len(header))]
    right = [i > 0 and all(row[i] in ("", "n/a") or row[i][0].isdigit() for row in body) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *map(line, body)])


def layers(model: nn.Module, *example: Any, schedule: Schedule | None = None, length: int | None = None) -> Layers:
    """Every sensible cut of a model with what it would cost. `print` it for a table.

    A sensible cut runs exactly once per forward pass, returns one floating point tensor with the batch first, is not
    the model's output, and does not lie within a branch of a block (a residual connection leads around it). Of several
    with equal cost the outermost stands for all.

    One forward pass is counted, in the mode (train or eval) the model is in, and leaves no trace. On the meta device
    (model and example) it takes no memory and next to no time; attention is not fused there, so its backward pass
    counts 2.0 instead of 2.5 times its forward.

    Args:
        model, *example, schedule, length: as for `cost`. With a schedule, the table has the cost of a run, too.
    """
    from .blocker import _unwrap

    pruned_share = _pruned_share(schedule, length)
    root, _ = _unwrap(model)
    args, kwargs = _arguments(example)
    survey = _Survey(root, batch.length((args, kwargs)), (args, kwargs))
    with survey.watching():
        _run(root, example, survey)
    rows = [
        Layer(e.name, type(e.module).__name__, e.shape[1:], survey.share(e.flops), pruned_share)
        for e in survey.sensible()
    ]
    return Layers(rows, type(root).__name__, schedule, length)


@dataclass
class _Exit:
    """The end of a module's call.

    shape: of its output, () if that is no place to cut. memory: the storages of its output.
    flops: of the forward pass so far. inside: of this call alone. clock: operations so far.
    around: the modules it was called in. bypassed_in: the innermost ones in which something else was handed past it.
    """

    name: str
    module: nn.Module
    shape: tuple[int, ...]
    memory: set[int]
    flops: float
    inside: float
    clock: int
    around: list[nn.Module]
    bypassed_in: set[nn.Module] = field(default_factory=set)


@dataclass
class _Frame:
    """A module's call that has not ended: the FLOPs and the number of exits at its start."""

    module: nn.Module
    flops: float
    first: int


class _Survey(Meter):
    """Meters a forward pass and notes where each module ended, and what was handed past it.

    To see the latter, it follows all tensors that depend on the batch: an operation within a module M that reads one
    which is older than the end of some part of M, and is not that part's output, goes around that part.
    """

    def __init__(self, root: nn.Module, size: int, inputs: Any) -> None:
        super().__init__()
        self._size = size
        self._names = {m: n for n, m in root.named_modules()}
        self._exits: list[_Exit] = []
        self._open: list[_Frame] = []
        self._clock = 0
        self._born = {_storage(t): 0 for t in _tensors(inputs)}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the modules' calls."""
        handles = [
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module in self._names:
            self._open.append(_Frame(module, self.forward, len(self._exits)))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module not in self._names:
            return
        frame = self._open.pop()
        usable = isinstance(output, Tensor) and output.is_floating_point() and output.ndim > 1
        shape = tuple(output.shape) if usable and output.shape[0] == self._size else ()
        self._exits.append(
            _Exit(
                name=self._names[module],
                module=module,
                shape=shape,
                memory={_storage(t) for t in _tensors(output)},
                flops=self.forward,
                inside=self.forward - frame.flops,
                clock=self._clock,
                around=[f.module for f in self._open[1:]],
            )
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._clock += 1
        read = {s for s in map(_storage, _tensors((args, kwargs))) if s in self._born}
        for storage in read:
            self._note_bypassed(storage)
        writes = bool(ops.traits(func).written)
        for storage in map(_storage, _tensors(out)):
            if storage in read and not writes:
                continue  # a view
            self._born.pop(storage, None)  # a freed tensor's, whose place this one took
            if read:
                self._born[storage] = self._clock
        return out

    def _note_bypassed(self, storage: int) -> None:
        depth = len(self._open) - 1
        for i in range(len(self._exits) - 1, -1, -1):
            while depth > 0 and self._open[depth].first > i:
                depth -= 1
            ended = self._exits[i]
            if depth <= 0 or ended.clock < self._born[storage]:
                return
            if storage not in ended.memory:
                ended.bypassed_in.add(self._open[depth].module)

    def sensible(self) -> list[_Exit]:
        """The cuts worth showing."""
        calls = Counter(e.module for e in self._exits)
        # A connection within a block rules out what it leads around. One within most of the model (U-Net) does not.
        large = {e.module for e in self._exits if e.inside >= self.forward / 2}
        blocks = {type(m) for e in self._exits for m in e.bypassed_in - large}
        at_cost: dict[float, list[_Exit]] = {}
        for e in self._exits:
            # Also in a block of the same kind that happens to have no such connection, as where the resolution falls.
            branch = any(type(m) in blocks for m in e.around if m not in large)
            last = e.flops == self.forward
            if e.name and e.shape and calls[e.module] == 1 and not (branch or last or _is_trivial(e.module)):
                at_cost.setdefault(e.flops, []).append(e)
        # The outermost; a block rather than a bare operation; the last, which has the activation behind it.
        return [
            min(reversed(same), key=lambda e: (e.name.count("."), not any(e.module.children())))
            for same in at_cost.values()
        ]


_TRIVIAL = {
    f"torch.nn.modules.{name}"
    for name in ("activation", "batchnorm", "normalization", "instancenorm", "dropout", "flatten")
}


def _is_trivial(module: nn.Module) -> bool:
    return isinstance(module, nn.Identity) or any(c.__module__ in _TRIVIAL for c in type(module).__mro__)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in batch.leaves(tree) if isinstance(leaf, Tensor))


def _storage(t: Tensor) -> int:
    # Not data_ptr: the meta device has none.
    return t.untyped_storage()._cdata
