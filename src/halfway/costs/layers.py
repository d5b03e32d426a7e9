"""Which layers of a model are sensible cuts, and what each of them would cost."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from torch import Tensor, nn

from ..batches import batch
from ..engine import ops
from ..engine.flops import Meter
from ..modules import unwrap
from ..schedule import Schedule
from ..tables import columns
from .cost import Cost, arguments, cost_of, run_metered, share_of_run

# The prune ratios of a table's columns.
RATIOS = (0.3, 0.5, 0.7)


@dataclass(frozen=True)
class Layer:
    """A place to cut.

    name: what to pass as `at`.
    type: of the module.
    output_shape: of one sample, without the batch axis.
    shallow_share: F/T.
    pruned_share: the part of a run in which samples are pruned.
    stage: index and resolution of this stage of a timm model ("1 (1/4)"); "" if it is none.
    """

    name: str
    type: str
    output_shape: tuple[int, ...]
    shallow_share: float
    pruned_share: float
    stage: str = ""

    def cost(self, prune_ratio: float) -> Cost:
        """The cost of cutting here and pruning this share of the samples."""
        return cost_of(self.shallow_share, prune_ratio, self.pruned_share)


class Layers(Sequence[Layer]):
    """The sensible cuts of a model, from shallow to deep. Prints as a table."""

    def __init__(self, rows: Sequence[Layer], model: str, schedule: Schedule | None, length: int | None) -> None:
        self._rows = tuple(rows)
        self.model = model
        self.schedule = schedule
        self.length = length
        self._staged = any(row.stage for row in self._rows)

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
        header = ["cut", *(["stage"] if self._staged else []), "module", "output", "F/T", *(f"p={p}" for p in RATIOS)]
        explained = "step: a step in which samples are pruned"
        if self.schedule is not None:
            header += [f"run p={p}" for p in RATIOS]
            stop = self.length if self.schedule.stop is None else self.schedule.stop
            unit = self.schedule.unit
            explained += f"; run: {self.length} {unit}s, pruned in [{self.schedule.start}, {stop})"
        if self._staged:
            explained += "\nstage: timm's index of it (as in out_indices), and its resolution"
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
        words = [row.name, *([row.stage] if self._staged else []), row.type, "x".join(map(str, row.output_shape))]
        return [*words, *(f"{n:.3f}" for n in numbers)]


def layers(model: nn.Module, *example: Any, schedule: Schedule | None = None, length: int | None = None) -> Layers:
    """Every sensible cut of a model and its cost. `print` it for a table.

    A sensible cut runs exactly once per forward pass and returns one floating point tensor with the batch first. It
    leads to the model's output without being it (of several outputs the one that took the most FLOPs, so auxiliary
    heads are no place to cut). It does not lie within a branch of a block, where a residual connection leads around it.
    Of several cuts with equal cost the outermost is listed; stages of a timm model are always listed.

    One forward pass is counted, in the mode (train or eval) the model is in, and leaves no trace. On the meta device
    (model and example) it takes no memory and next to no time; attention is not fused there, so its backward pass
    counts 2.0 instead of 2.5 times its forward.

    Args:
        model, *example, schedule, length: as for `cost`. With a schedule, the table has the cost of a run, too.
    """
    pruned_share = share_of_run(schedule, length)
    root, _ = unwrap(model)
    args, kwargs = arguments(example)
    survey = _Survey(root, batch.length((args, kwargs)), (args, kwargs))
    with survey.watching():
        run_metered(root, example, survey)
    stages = _stages(root)
    rows = [
        Layer(e.name, type(e.module).__name__, e.shape[1:], survey.share(e.flops), pruned_share, stages.get(e.name, ""))
        for e in survey.sensible(stages)
    ]
    return Layers(rows, type(root).__name__, schedule, length)


def _stages(root: nn.Module) -> dict[str, str]:
    """timm's stages by module name, of this model or of one within it, as they are shown.

    Read from the attribute `feature_info`, which other libraries may use for something else: anything that does not
    look like timm's is ignored.
    """
    found: dict[str, str] = {}
    for prefix, module in root.named_modules():
        # Not getattr: a property of that name could do anything.
        info = vars(module).get("feature_info")
        entries = getattr(info, "info", info)
        if not isinstance(entries, (list, tuple)):
            continue
        for i, entry in enumerate(entries):
            name = entry.get("module") if isinstance(entry, dict) else None
            if isinstance(name, str) and name:
                reduction = entry.get("reduction")
                shown = f"{i} (1/{reduction})" if type(reduction) is int and reduction > 0 else str(i)
                found.setdefault(f"{prefix}.{name}" if prefix else name, shown)
    return found


@dataclass
class _Exit:
    """The end of a module's call.

    shape: of its output; () if that is no place to cut.
    memory: the storages of its output.
    flops: of the forward pass so far.
    inside: FLOPs of this call alone.
    clock: operations so far.
    made: the operation that made its output; 0 if that is an input, -1 if it does not depend on the batch.
    around: the modules it was called in.
    bypassed_in: the innermost of these in which another tensor went around it.
    """

    name: str
    module: nn.Module
    shape: tuple[int, ...]
    memory: set[int]
    flops: float
    inside: float
    clock: int
    made: int
    around: list[nn.Module]
    bypassed_in: set[nn.Module] = field(default_factory=set)


@dataclass
class _Frame:
    """A module's call that has not ended: the FLOPs and the number of exits at its start."""

    module: nn.Module
    flops: float
    first: int


class _Survey(Meter):
    """Meters a forward pass and notes where each module ended, and which tensors went around it.

    To find those, it follows all tensors that depend on the batch: if an operation within a module M reads a tensor
    that is older than the end of some part of M and is not that part's output, the tensor went around that part.

    What a tensor depends on is a set of operations, stored as the bits of a number: bit i for the i-th operation, bit 0
    for the inputs.
    """

    def __init__(self, root: nn.Module, size: int, inputs: Any) -> None:
        super().__init__()
        self._size = size
        self._names = {m: n for n, m in root.named_modules()}
        self._exits: list[_Exit] = []
        self._open: list[_Frame] = []
        self._clock = 0
        self._root = root
        self._sources = {_storage(t): 1 for t in _tensors(inputs)}
        self._spent = [0.0]  # by operation
        self._main = 0  # what the output depends on; of several outputs the one that took the most FLOPs

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
        if module is self._root:
            found = [self._sources.get(_storage(t), 0) for t in _tensors(output)]
            self._main = max(found, key=self._flops_of, default=0)
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
                made=max((_latest(self._sources.get(_storage(t), 0)) for t in _tensors(output)), default=-1),
                around=[f.module for f in self._open[1:]],
            )
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.forward
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._clock += 1
        self._spent.append(self.forward - before)
        read = {s for s in map(_storage, _tensors((args, kwargs))) if s in self._sources}
        sources = 1 << self._clock
        for storage in read:
            self._note_bypassed(storage)
            sources |= self._sources[storage]
        writes = bool(ops.traits(func).written)
        for storage in map(_storage, _tensors(out)):
            if storage in read and not writes:
                continue  # a view
            self._sources.pop(storage, None)  # left by a freed tensor whose memory this one took
            if read:
                self._sources[storage] = sources
        return out

    def _note_bypassed(self, storage: int) -> None:
        depth = len(self._open) - 1
        for i in range(len(self._exits) - 1, -1, -1):
            while depth > 0 and self._open[depth].first > i:
                depth -= 1
            ended = self._exits[i]
            if depth <= 0 or ended.clock < _latest(self._sources[storage]):
                return
            if storage not in ended.memory:
                ended.bypassed_in.add(self._open[depth].module)

    def sensible(self, stages: Container[str]) -> list[_Exit]:
        """The cuts worth showing. `stages`: names to show even if the module is a bare operation."""
        calls = Counter(e.module for e in self._exits)
        # A connection within a block rules out what it leads around. One within most of the model (U-Net) does not.
        large = {e.module for e in self._exits if e.inside >= self.forward / 2}
        blocks = {type(m) for e in self._exits for m in e.bypassed_in - large}
        # If the output does not seem to depend on the batch, every cut counts as leading to it.
        main = self._main or (1 << self._clock + 1) - 1
        end = max((i for i, flops in enumerate(self._spent) if flops and main >> i & 1), default=0)
        at_cost: dict[float, list[_Exit]] = {}
        for e in self._exits:
            # Also in blocks of the same kind that happen to have no such connection (where the resolution falls).
            branch = any(type(m) in blocks for m in e.around if m not in large)
            onward = e.made >= 0 and main >> e.made & 1 and e.clock < end
            shown = e.name in stages or not _is_trivial(e.module)
            if e.name and e.shape and calls[e.module] == 1 and shown and onward and not branch:
                at_cost.setdefault(e.flops, []).append(e)
        return [e for same in at_cost.values() for e in _to_show(same, stages)]

    def _flops_of(self, sources: int) -> float:
        return sum(flops for i, flops in enumerate(self._spent) if flops and sources >> i & 1)


def _to_show(same: list[_Exit], stages: Container[str]) -> list[_Exit]:
    """Which of several cuts with equal cost to show: the outermost, and the stages.

    A stage replaces the outermost if it has the same features (`stages.3`, the last one in `stages`), and is shown
    beside it if not (`act1`, before the pooling of `maxpool`).
    """
    usual = [e for e in same if not _is_trivial(e.module)]
    # A block rather than a bare operation; of several the last, which includes the activation.
    outermost = min(reversed(usual), key=lambda e: (e.name.count("."), not any(e.module.children())), default=None)
    shapes = {e.shape for e in same if e.name in stages}
    return [e for e in same if e.name in stages or (e is outermost and e.shape not in shapes)]


_TRIVIAL = {
    f"torch.nn.modules.{name}"
    for name in ("activation", "batchnorm", "normalization", "instancenorm", "dropout", "flatten")
}


def _is_trivial(module: nn.Module) -> bool:
    return isinstance(module, nn.Identity) or any(c.__module__ in _TRIVIAL for c in type(module).__mro__)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in batch.leaves(tree) if isinstance(leaf, Tensor))


def _latest(sources: int) -> int:
    """The last operation of a set; -1 if there is none."""
    return sources.bit_length() - 1


def _storage(t: Tensor) -> int:
    # Not data_ptr: the meta device has none.
    return t.untyped_storage()._cdata
