"""Running the shallow part of a model: probes, and what proves that they may be replayed.

The shallow part ends at a layer, or is the whole model, and then only the backward pass is saved. All of these run the
user's model, or that part of it, and leave no trace but what they return.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from ..batches import batch
from ..batches.inputs import Forward, Inputs
from ..errors import not_finite
from ..modules import is_compiled
from .axis import Logged
from .flops import Meter
from .footprint import Footprint
from .interception import Interception
from .plan import Plan, disagreement, tolerance
from .rehearsal import Rehearsal, Swap
from .replay import Replayer
from .sandbox import Guard, HostRandom, NoGraph, TorchRandom, put_back, sandbox
from .tape import Diverged, Recorder, Tape

# Differences beyond this many tolerances are errors, not rounding.
ERROR = 4.0
# How many kinds of steps are remembered, and how many rehearsals are normal before it looks hopeless.
_PLANS = 64
_MANY_REHEARSALS = 16

# In every so many probes everything that the model holds is looked at.
_AUDIT_EVERY = 256

AtCut = Callable[[nn.Module, Any, Any], None]

_UNDECIDED = "a random draw in the shallow part did not show yet which sample it belongs to"


class Stop(BaseException):
    """Raised at the cut to end a pass. A BaseException: no model's own `except` should swallow it."""


class Seen(NamedTuple):
    """What a pass over all samples showed.

    features: the cut's output; of a whole model, the first of its outputs that has a row per sample.
    outputs: all that the cut returned, detached.
    watched: what entered the watched module, if there is one.
    """

    features: Tensor
    outputs: Any
    watched: Tensor | None


class CutSkipped(Exception):
    """The cut, which did run in an earlier batch, did not run in this one."""


class Probe(NamedTuple):
    """What was seen, the tape, and where the random generators were before: the global ones, and the model's own."""

    seen: Seen
    tape: Tape
    host_random: HostRandom
    torch_random: TorchRandom
    generators: list[tuple[torch.Generator, Tensor]]

    @property
    def features(self) -> Tensor:
        return self.seen.features

    def rewind(self) -> None:
        """Put the random generators back, as if the probe had never happened."""
        put_back(self.generators)
        self.host_random.restore()
        self.torch_random.restore()


class Shallow:
    """The part of a model up to one of its layers.

    Args:
        root: the innermost model, without wrappers.
        layer: the cut, a submodule of root, or root itself.
        layer_name: its name, for messages.
        compiled: whether the model is called through torch.compile.
        watched: a module whose input probes report, if it runs before the cut.
        output: which of several outputs of the layer is the cut, by position or name.

    Attributes:
        several_ranks: whether other processes train the same model, and may exchange its buffers.
        autocast: the state of autocast in the model's last training call; None before the first.
    """

    def __init__(
        self,
        root: nn.Module,
        layer: nn.Module,
        layer_name: str,
        compiled: bool,
        watched: nn.Module | None = None,
        output: int | str | None = None,
    ) -> None:
        self.root = root
        self.layer = layer
        self.whole = layer is root
        self.output = output
        self.layer_name = layer_name
        self.compiled = compiled
        self.several_ranks = False
        self.autocast: tuple[bool, torch.dtype] | None = None
        self.footprint = Footprint(root)
        self.forward = Forward(root)
        self.last_plan: Plan | None = None
        self._plans: dict[Any, list[Plan]] = {}
        self._probes = self._rehearsals = 0
        self._reached = False
        self._waiting: list[AtCut] = []
        # What has entered the watched module, while a probe collects it.
        self._entering: list[list[Tensor]] = []
        self._hooks = [_Hook(layer, "_forward_hooks", _passing_on_to(self._waiting))]
        if watched is not None:
            self._hooks.append(_Hook(watched, "_forward_pre_hooks", _collecting_in(self._entering)))
        # Programs of passes that are known, by number of samples; the last one; whether one was new that took its path
        # without all modules being watched.
        self._programs: dict[int, list[Any]] = {}
        self._last_program: tuple[int, list[Any]] = (0, [])
        self._look_again = False
        # Whether the shallow part runs a backward pass of its own, for which things must be saved.
        self._needs_graph = False

    def probe(self, inputs: Inputs, size: int, refusal: str = "") -> Probe:
        """Run the model up to the cut on all `size` samples. `refusal`: why it need not be recorded, if it need not.

        Afterwards parameters, buffers, inputs and attributes are what they were; only the random generators have
        moved, as a replay will not move them again (`Probe.rewind` takes that back too).
        """
        self._probes += 1
        graph = NoGraph()
        try:
            probe = self._probe(inputs, size, refusal, graph)
            if not graph.missed:
                return probe
            probe.rewind()
        except Exception:
            if not graph.missed:
                raise
        self._needs_graph = True
        return self._probe(inputs, size, refusal, None)

    def _probe(self, inputs: Inputs, size: int, refusal: str, graph: NoGraph | None) -> Probe:
        tensors = inputs.tensors()
        found: list[Any] = []
        entered: set[nn.Module] = {self.root}

        def stop(module: nn.Module, args: Any, output: Any) -> None:
            found.append(output)
            if recorder is not None:
                recorder.finished = True
            raise Stop

        seen: Seen | None = None
        host_random, torch_random = HostRandom(), TorchRandom(tensors[0].device)
        recorder: Recorder | None = None
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.hooked(stop))
                watched: list[Tensor] = []
                self._entering.append(watched)
                stack.callback(self._entering.pop)
                # The first one: everything the model holds is looked at, and which modules take part.
                new = self.footprint.refresh() or not self._reached or self._look_again
                touched: set[int] = set()
                if new:
                    self.footprint.watch_all()
                    stack.enter_context(_modules_seen(lambda m, _: entered.add(m)))
                    stack.callback(self.footprint.watch, entered, touched)
                audit = stack.enter_context(self.footprint.kept(new or self._probes % _AUDIT_EVERY == 0))
                recorder = Recorder(tensors, self.footprint.owned, size)
                recorder.touched = touched if new else None
                if self._last_program[0] == size:
                    recorder.expect(self._last_program[1], audit.begin)
                if refusal:
                    recorder.tape.refuse(refusal)
                stack.enter_context(self._passing(tensors[0], graph))
                stack.enter_context(recorder)
                self._run(inputs)
            seen = self.seen(found, size, watched)
            self._reached = True
            self._look_again = not self._is_known(size, recorder.tape.program) and not new
            if self._look_again:
                self.footprint.watch_all()
            if self._refusal():
                recorder.tape.refuse(self._refusal())
            if self.several_ranks and not recorder.written <= self.footprint.written_statistics():
                # DDP's broadcast_buffers does so right before the forward, and does not always show in a version.
                recorder.tape.refuse("the shallow part writes buffers of its own, which ranks exchange before the call")
            if recorder.wrote_input:
                recorder.tape.refuse("the model changes its input in place")
        finally:
            if recorder is not None:
                recorder.undo()
            if seen is None:
                put_back(recorder.generators if recorder is not None else [])
                host_random.restore()
                torch_random.restore()
        return Probe(seen, recorder.tape, host_random, torch_random, recorder.generators)

    def _is_known(self, size: int, program: list[Any]) -> bool:
        self._last_program = size, program
        known = self._programs.setdefault(size, [])
        if program in known:
            return True
        if sum(map(len, self._programs.values())) >= _PLANS:
            self._programs.clear()
        self._programs.setdefault(size, []).append(program)
        return False

    def check(self, probe: Probe) -> None:
        """Raise if the first batch already gives features that cannot be scored."""
        if not probe.features.isfinite().all():
            probe.rewind()
            raise FloatingPointError(not_finite(self.layer_name))

    @contextlib.contextmanager
    def metered(self, meter: Meter) -> Iterator[None]:
        """A whole call of the model, of which the FLOPs are counted. It must come through the cut once."""
        visits = 0

        def at_cut(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal visits
            visits += 1
            meter.reached_cut()
            if visits > 1:
                raise ValueError(
                    f"layer {self.layer_name!r} runs more than once in one forward pass, so it is no place to cut; "
                    "choose one that runs once (`halfway layers` lists them)"
                )

        with self.hooked(at_cut), meter:
            yield

    def meter(self, inputs: Inputs) -> Meter:
        """Run the whole model for its FLOPs, and leave no trace: where its own call cannot be looked into."""
        tensors = inputs.tensors()
        guard, meter = Guard(tensors), Meter()
        with (
            sandbox(self.footprint, guard, tensors[0].device),
            self._passing(tensors[0], None if self._needs_graph else NoGraph()),
            self.metered(meter),
            guard,
        ):
            self._run(inputs)
        return meter

    def seen(self, found: list[Any], size: int, watched: list[Tensor] | None = None) -> Seen:
        """What the cut returned, checked, and what entered the watched module."""
        features = self.features(found, size)
        outputs = tree_map_only(Tensor, Tensor.detach, found[0]) if self.whole else features
        return Seen(features, outputs, watched[0] if watched else None)

    def features(self, found: list[Any], size: int) -> Tensor:
        """The one tensor with a row per sample that the cut returned, detached."""
        if self.whole:
            return self._first_output(found[0], size)
        name = self.layer_name
        if not found and self._reached:
            raise CutSkipped
        if not found:
            raise ValueError(
                f"layer {name!r} never runs in the model's forward pass, so nothing can be cut there; choose one that "
                "does (`halfway layers` lists them)"
            )
        features = self._cut_of(found[0])
        if not isinstance(features, Tensor):
            what = type(features).__name__
            raise TypeError(
                f"layer {name!r} returns a {what}, not a tensor; say which part of it is the cut (output=0, or "
                "output='name'), or cut at another layer (`halfway layers` lists those that return a tensor)"
                if self.output is None
                else f"output={self.output!r} of layer {name!r} is a {what}, not a tensor"
            )
        if not features.is_floating_point():
            raise TypeError(f"layer {name!r} returns {features.dtype}, not floating point features; cut further down")
        if features.ndim < 2 or features.shape[0] != size:
            raise ValueError(
                f"layer {name!r} returns shape {tuple(features.shape)} for {size} samples; the batch must come first. "
                "Cut at a layer outside of the part that folds or transposes the batch"
            )
        return features.detach()

    def _first_output(self, outputs: Any, size: int) -> Tensor:
        for leaf in batch.leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 0 and leaf.shape[0] == size:
                return leaf.detach().reshape(size, -1)
        raise TypeError(
            f"the model returns a {type(outputs).__name__} without a floating point tensor of {size} rows, one per "
            "sample, so there is nothing to score; use a selector that looks at features or at nothing"
        )

    def has_compiled_parts(self) -> bool:
        return self.compiled or any(map(is_compiled, self.footprint.modules))

    def _refusal(self) -> str:
        if self.compiled:
            return "the model is compiled (compile only its deep part to replay)"
        if self.footprint.compiled:
            return "the shallow part is compiled (compile only the deep part to replay)"
        if self.footprint.shards:
            # A rehearsal, or a replay that diverges, runs layers once more. On one rank alone that would be a hang.
            return "the model is sharded by FSDP2, whose ranks must run every layer equally often"
        if self._needs_graph:
            return "the shallow part runs autograd itself (torch.autograd.grad, torch.func)"
        return ""

    def _run(self, inputs: Inputs) -> None:
        """Call the model, until somebody raises `Stop` or to its end.

        FSDP2 expects every forward to return, and a backward pass before the weights change: it sees the one, and is
        told that the other will not come.
        """
        shards = self.footprint.shards
        with contextlib.suppress(Stop), contextlib.ExitStack() as stack:
            if shards:
                stack.enter_context(Interception(self.root, "forward", _until_stopped))
            self.root(*inputs.args, **inputs.kwargs)
        for shard in shards:
            shard.reshard()

    def _passing(self, example: Tensor, graph: NoGraph | None) -> contextlib.AbstractContextManager[Any]:
        """The circumstances of the model's call: autocast as in its last one, and grad enabled, for without grad many
        models run other operations. Nothing is saved for a backward pass that will never come, if `graph` says so."""
        device = example.device.type
        enabled, dtype = autocast = self.expected_autocast(example)
        compiled = self.compiled or self.footprint.compiled
        if graph is not None and not compiled and autocast == autocast_state(device):
            return graph
        stack = contextlib.ExitStack()
        if compiled:
            # Some versions never compile again what they once met under a dispatch mode.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if graph is not None:
            stack.enter_context(graph)
        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        return stack

    def hooked(self, at_cut: AtCut) -> _Hooked:
        """Have `at_cut` called when the layer returns.

        Always the same hooks under the same numbers, which pass on to whatever is waiting: what the model holds is
        compared from step to step, and this is no change of it.
        """
        return _Hooked(self._hooks, self._waiting, at_cut)

    def plan(self, probe: Probe, inputs: Inputs, cut: Callable[[Tensor], Inputs], retained: int) -> Plan:
        """The plan for steps like this one: a known one, or a new one. `cut` gives the inputs of some samples."""
        self.last_plan = self._plan(probe, inputs, cut, retained)
        return self.last_plan

    def _plan(self, probe: Probe, inputs: Inputs, cut: Callable[[Tensor], Inputs], retained: int) -> Plan:
        if probe.tape.refusal:
            return Plan(refusal=probe.tape.refusal)
        described = tuple((t.shape, t.stride(), t.dtype, t.device) for t in inputs.tensors())
        key = (probe.tape.size, retained, described, self.expected_autocast(inputs.tensors()[0]))
        known = self._plans.setdefault(key, [])
        for plan in known:
            if plan.program == probe.tape.program:
                return plan
        if self._rehearsals > _MANY_REHEARSALS and self._rehearsals > self._probes / 4:
            return Plan(refusal="the shallow part takes another path, or another input shape, in most steps")
        plan = self._prove(probe, cut, retained)
        if plan.undecided and not plan.refusal:
            return Plan(plan.program, ops=plan.ops, refusal=_UNDECIDED)
        if sum(map(len, self._plans.values())) >= _PLANS:
            self._plans.clear()
        self._plans.setdefault(key, []).append(plan)
        return plan

    def _prove(self, probe: Probe, cut: Callable[[Tensor], Inputs], retained: int) -> Plan:
        """Find out whose recordings are whose, and that samples do not see each other. Leaves no trace."""
        self._rehearsals += 1
        drew_on_host = probe.host_random.moved()
        device, size = probe.features.device, probe.tape.size
        rows = rehearsed_rows(size, retained).to(device)
        others = torch.ones(size, dtype=torch.bool, device=device).index_fill(0, rows, False).nonzero().flatten()
        swapped = torch.arange(size, device=device)
        swapped[rows] = others.repeat(-(-retained // len(others)))[:retained]
        plan = Plan(program=[Logged(*logged) for logged in probe.tape.program])
        try:
            self._rehearse(probe, plan, cut(rows), rows)
            mixing = self._swap(probe, plan, cut, swapped, others)
            if mixing:
                if any(len(places) > 1 for op in plan.ops if op.kind == "random" for places in op.options):
                    raise Diverged("the shallow part mixes samples, or random draws belong to others than they seem to")
                plan = Plan(program=plan.program, forced=mixing)
                self._rehearse(probe, plan, cut(rows), rows)
            share, why = plan.mixed()
            if share == 1:
                raise Diverged(f"all of the shallow part depends on other samples of the batch: it follows {why}")
        except Diverged as difference:
            plan.refusal = difference.reason
            if drew_on_host:
                plan.refusal += " (it draws with Python's or NumPy's generator, which may be once for each sample)"
        return plan

    def _rehearse(self, probe: Probe, plan: Plan, part: Inputs, rows: Tensor) -> None:
        """Run the shallow part on some of the samples and compare every operation with the tape."""
        entered = [""]
        rehearsal = Rehearsal(part.tensors(), probe.tape, plan, rows, lambda: entered[-1])

        def enter(module: nn.Module, args: Any) -> None:
            entered.append(self.footprint.name(module) or entered[-1])

        def at_cut(output: Any) -> None:
            rehearsal.finish()
            plan.mixed_features = rehearsal.mixed(self._cut_of(output))
            rehearsal.leave()
            with _disable_current_modes():
                found = self.features([output], len(rows))
                expected = probe.features.index_select(0, rows).flatten(1)
                off = disagreement(expected, found.flatten(1)) / tolerance(found)
            if off > ERROR and not plan.mixed_features:
                raise Diverged(f"the features of {self.layer_name!r} depend on the other samples of the batch")

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            entered.pop()

        try:
            with _modules_seen(enter, leave):
                self._pass(probe, rehearsal, part, at_cut)
        except Diverged as difference:
            if difference.__cause__ is not None:
                self._run_plainly(part)  # raises the same, if it was the model's own failure
            raise

    def _run_plainly(self, inputs: Inputs) -> None:
        """Run the shallow part, and leave no trace."""

        def stop(module: nn.Module, args: Any, output: Any) -> None:
            raise Stop

        tensors = inputs.tensors()
        guard = Guard(tensors)
        with (
            self.hooked(stop),
            sandbox(self.footprint, guard, tensors[0].device),
            self._passing(tensors[0], NoGraph()),
            guard,
        ):
            self._run(inputs)

    def _cut_of(self, output: Any) -> Any:
        return output if self.output is None else _part(output, self.output, self.layer_name)

    def _swap(
        self, probe: Probe, plan: Plan, cut: Callable[[Tensor], Inputs], swapped: Tensor, others: Tensor
    ) -> set[int]:
        """Run the shallow part on all samples, some overwritten with others, which must not change by that; returns
        the operations in which they do."""

        def run(rows: Tensor, expected: dict[int, list[list[Tensor]]] | None) -> Swap:
            inputs = cut(rows)
            swap = Swap(inputs.tensors(), probe.tape, plan, rows, others, expected)
            self._pass(probe, swap, inputs, lambda output: swap.leave())
            return swap

        same = torch.arange(len(swapped), device=swapped.device)
        sums = run(same, None).sums
        changed = run(swapped, sums).changed()
        # Not the fault of the samples if it does not give the same for the same.
        return changed - run(same, sums).changed() if changed else changed

    def _pass(self, probe: Probe, passing: Replayer, inputs: Inputs, at_cut: Callable[[Any], None]) -> None:
        """Run the shallow part under `passing`, to the cut and as the probe did. Leaves no trace."""

        failure: list[Diverged] = []

        def stop(module: nn.Module, args: Any, output: Any) -> None:
            try:
                at_cut(output)
            except Diverged as difference:
                failure.append(difference)  # the model may swallow it
            raise Stop

        example = inputs.tensors()[0]
        with self.hooked(stop), sandbox(self.footprint, passing, example.device, audited=True):
            probe.host_random.restore()
            with self._passing(example, NoGraph()), passing.entered():
                try:
                    self._run(inputs)
                except Exception as error:
                    raise Diverged(failed(error)) from error
        if failure:
            raise failure[0]
        passing.check()

    def expected_autocast(self, example: Tensor) -> tuple[bool, torch.dtype]:
        return self.autocast or autocast_state(example.device.type)


class _Hook:
    """A hook of a module that comes and goes, always under the same number."""

    def __init__(self, module: nn.Module, kind: str, function: Any) -> None:
        self._module, self._kind, self._function = module, kind, function
        self._number = RemovableHandle(OrderedDict()).id

    def put_in(self) -> None:
        getattr(self._module, self._kind)[self._number] = self._function

    def take_out(self) -> None:
        getattr(self._module, self._kind).pop(self._number, None)


class _Hooked:
    def __init__(self, hooks: list[_Hook], waiting: list[AtCut], at_cut: AtCut) -> None:
        self._hooks, self._waiting, self._at_cut = hooks, waiting, at_cut

    def __enter__(self) -> None:
        self._waiting.append(self._at_cut)
        for hook in self._hooks:
            hook.put_in()

    def __exit__(self, *_: object) -> None:
        self._waiting.pop()
        if not self._waiting:
            for hook in self._hooks:
                hook.take_out()


def _passing_on_to(waiting: list[AtCut]) -> AtCut:
    # A function, which a copy of the model takes along as it is; a bound method would be copied with its object.
    def reached(module: nn.Module, args: Any, output: Any) -> None:
        for at_cut in waiting:
            at_cut(module, args, output)

    return reached


def _collecting_in(entering: list[list[Tensor]]) -> Callable[[nn.Module, Any], None]:
    def enters(module: nn.Module, args: Any) -> None:
        if entering and args and isinstance(args[0], Tensor):
            entering[-1].append(args[0].detach())

    return enters


def failed(error: Exception) -> str:
    """In words. If it is the model's own failure, its call on the retained samples will raise it again."""
    return f"the shallow part fails on other samples than the whole batch ({type(error).__name__}: {error})"


def _part(found: Any, output: int | str, name: str) -> Any:
    try:
        return found[output]
    except (LookupError, TypeError) as error:
        raise ValueError(
            f"layer {name!r} returns a {type(found).__name__} that has no output={output!r} ({error})"
        ) from None


@contextlib.contextmanager
def _modules_seen(
    enter: Callable[[nn.Module, Any], None], leave: Callable[[nn.Module, Any, Any], None] | None = None
) -> Iterator[None]:
    """Every module that is called says so, and when it returns."""
    handles = [nn.modules.module.register_module_forward_pre_hook(enter)]
    if leave is not None:
        handles.append(nn.modules.module.register_module_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rehearsed_rows(size: int, retained: int) -> Tensor:
    """(S,) sorted rows of N, always the same ones. Scattered, or an operation that rolls the batch would show in one
    row only; not symmetric, or one that flips it would not show at all."""
    generator = torch.Generator("cpu").manual_seed(0)
    for _ in range(16):
        rows = torch.randperm(size, generator=generator, device="cpu")[:retained].sort().values
        if not torch.equal(rows, (size - 1 - rows).flip(0)):
            break
    return rows


def _until_stopped(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return original(*args, **kwargs)
    except Stop:
        return None


def autocast_state(device_type: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
