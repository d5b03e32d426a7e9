"""Running a model up to its cut on all samples: the probe. Everything here leaves no trace but what it returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..batches.inputs import Call, Inputs
from ..modules import is_compiled
from .autocast import Autocast, AutocastState
from .cut import Cut, Seen
from .flops import Meter
from .footprint import Footprint
from .interception import Interception
from .sandbox import Guard, HostRandom, NoGraph, TorchRandom, put_back, sandbox
from .tape import Recorder, Tape

# How many programs of passes are remembered.
_PROGRAMS = 64

# In every so many probes everything that the model holds is looked at.
_AUDIT_EVERY = 256


class Stop(BaseException):
    """Raised at the cut to end a pass. A BaseException: no model's own `except` should swallow it."""


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


class Prober:
    """Runs the shallow part of a model.

    Args:
        cut: where it ends.
        several_ranks: whether other processes train the same model, and may exchange its buffers.

    Attributes:
        footprint: what the model holds.
        autocast: what it was in the model's last training call.
        probes: how many there were.
    """

    def __init__(self, cut: Cut, several_ranks: bool) -> None:
        self.cut = cut
        self.footprint = Footprint(cut.root)
        self.autocast = Autocast()
        self.probes = 0
        self._several_ranks = several_ranks
        # Programs of passes that are known, by number of samples; the last one; whether the next pass must watch all
        # modules, for the last one was new and took its path with only some of them watched.
        self._programs: dict[int, list[Any]] = {}
        self._last_program: tuple[int, list[Any]] = (0, [])
        self._look_again = True
        # Whether the shallow part runs a backward pass of its own, for which things must be saved.
        self._needs_graph = False

    def probe(self, inputs: Inputs, size: int, refusal: str = "") -> Probe:
        """Run the model up to the cut on all `size` samples. `refusal`: why it need not be recorded, if it need not.

        Afterwards parameters, buffers, inputs and attributes are what they were; only the random generators have
        moved, as a replay will not move them again (`Probe.rewind` takes that back too).
        """
        self.probes += 1
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
        watched: list[Tensor] = []
        entered: set[nn.Module] = {self.cut.root}

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
                stack.enter_context(self.cut.hooked(stop, watched))
                # Where anything is new, everything the model holds is looked at, and which modules take part.
                new = self.footprint.refresh() or self._look_again or size not in self._programs
                touched: set[int] = set()
                if new:
                    self.footprint.watch_all()
                    stack.enter_context(modules_seen(lambda m, _: entered.add(m)))
                    stack.callback(self.footprint.watch, entered, touched)
                audit = stack.enter_context(self.footprint.kept(new or self.probes % _AUDIT_EVERY == 0))
                recorder = Recorder(tensors, self.footprint.owned, size)
                recorder.touched = touched if new else None
                if self._last_program[0] == size:
                    recorder.expect(self._last_program[1], audit.begin)
                if refusal:
                    recorder.tape.refuse(refusal)
                stack.enter_context(self.passing(tensors[0].device, graph))
                stack.enter_context(recorder)
                self.run(inputs)
            seen = self.cut.seen(found, size, watched)
            self._look_again = not self._is_known(size, recorder.tape.program) and not new
            if self._look_again:
                self.footprint.watch_all()
            self._refuse(recorder)
        finally:
            if recorder is not None:
                recorder.undo()
            if seen is None:
                put_back(recorder.generators if recorder is not None else [])
                host_random.restore()
                torch_random.restore()
        probe = Probe(seen, recorder.tape, host_random, torch_random, recorder.generators)
        if not (self._look_again and self.footprint.compiled) or probe.tape.refusal:
            return probe
        # The path is new, and whether it leads through something compiled shows if all modules are watched.
        probe.rewind()
        return self._probe(inputs, size, refusal, graph)

    def _is_known(self, size: int, program: list[Any]) -> bool:
        self._last_program = size, program
        known = self._programs.setdefault(size, [])
        if program in known:
            return True
        if sum(map(len, self._programs.values())) >= _PROGRAMS:
            self._programs.clear()
        self._programs.setdefault(size, []).append(program)
        return False

    def _refuse(self, recorder: Recorder) -> None:
        """Note on the tape why it cannot be replayed, if anything about this model or pass says so."""
        tape = recorder.tape
        if self.cut.compiled:
            tape.refuse("the model is compiled (to replay, use halfway.compile(model, at=...) instead)")
        elif self.footprint.compiled and self.cut.at_output:
            tape.refuse(
                "parts of this model are compiled, and all of it runs before its output (compile all or nothing)"
            )
        elif self.footprint.compiled and not self._look_again:
            tape.refuse("the shallow part is compiled (to replay, use halfway.compile(model, at=...) instead)")
        elif self.footprint.shards:
            # A rehearsal, or a replay that diverges, runs layers once more. On one rank alone that would be a hang.
            tape.refuse("the model is sharded by FSDP2, whose ranks must run every layer equally often")
        elif self._needs_graph:
            tape.refuse("the shallow part runs autograd itself (torch.autograd.grad, torch.func)")
        if self._several_ranks and not recorder.written <= self.footprint.written_statistics():
            # DDP's broadcast_buffers does so right before the forward, and does not always show in a version.
            tape.refuse("the shallow part writes buffers of its own, which ranks exchange before the call")
        if recorder.wrote_input:
            tape.refuse("the model changes its input in place")

    @contextlib.contextmanager
    def metered(self, meter: Meter) -> Iterator[None]:
        """A whole call of the model, of which the FLOPs are counted. It must come through the cut once."""
        visits = 0

        def at_cut(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal visits
            visits += 1
            meter.reached_cut()
            if visits > 1:
                raise self.cut.more_than_once()

        with self.cut.hooked(at_cut), meter:
            yield

    def meter(self, inputs: Inputs) -> Meter:
        """Run the whole model for its FLOPs: where its own call cannot be looked into."""
        tensors = inputs.tensors()
        guard, meter = Guard(tensors), Meter()
        with (
            sandbox(self.footprint, guard, tensors[0].device),
            self.passing(tensors[0].device, None if self._needs_graph else NoGraph()),
            self.metered(meter),
            guard,
        ):
            self.run(inputs)
        return meter

    def run_plainly(self, inputs: Inputs) -> None:
        """Run the shallow part as the model itself would, for the error that may raise."""

        def stop(module: nn.Module, args: Any, output: Any) -> None:
            raise Stop

        tensors = inputs.tensors()
        guard = Guard(tensors)
        with (
            self.cut.hooked(stop),
            sandbox(self.footprint, guard, tensors[0].device),
            self.passing(tensors[0].device, NoGraph()),
            guard,
        ):
            self.run(inputs)

    def run(self, inputs: Inputs) -> None:
        """Call the model, until a hook raises `Stop` or to its end.

        FSDP2 expects every forward to return, and a backward pass before the weights change: it sees the one, and is
        told that the other will not come.
        """
        shards = self.footprint.shards
        with contextlib.suppress(Stop), contextlib.ExitStack() as stack:
            if shards:
                stack.enter_context(Interception(self.cut.root, "forward", _until_stopped))
            self.cut.root(*inputs.args, **inputs.kwargs)
        for shard in shards:
            shard.reshard()

    def passing(self, device: torch.device, graph: NoGraph | None) -> contextlib.AbstractContextManager[Any]:
        """The circumstances of the model's call: autocast as in its last one, and grad enabled, for without grad many
        models run other operations. Nothing is saved for a backward pass that will never come, if `graph` says so."""
        autocast = self.autocast.expected(device)
        compiled = self.cut.compiled or self.footprint.compiled
        if graph is not None and not compiled and autocast == AutocastState.now(device):
            return graph
        stack = contextlib.ExitStack()
        if compiled:
            # Some versions never compile again what they once met under a dispatch mode.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if graph is not None:
            stack.enter_context(graph)
        stack.enter_context(torch.autocast(device.type, dtype=autocast.dtype, enabled=autocast.enabled))
        return stack

    def eager(self) -> contextlib.AbstractContextManager[Any]:
        """Compiled parts must not meet a dispatch mode: some versions never compile them again."""
        compiled = self.cut.compiled or any(map(is_compiled, self.footprint.modules))
        return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def step_flops(root: nn.Module, compiled: bool, call: Call) -> float:
    """FLOPs of a training step per sample. Two samples run through the whole model, and leave no trace."""
    few = call.part(torch.arange(min(2, call.size), device=call.inputs.tensors()[0].device))
    meter = Prober(Cut(root, root, "the model's output", compiled), several_ranks=False).meter(few.inputs)
    return (meter.forward + meter.backward) / few.size


@contextlib.contextmanager
def modules_seen(
    enter: Callable[[nn.Module, Any], None], leave: Callable[[nn.Module, Any, Any], None] | None = None
) -> Iterator[None]:
    """Have `enter` called with every module that is called, and `leave` when it returns."""
    handles = [nn.modules.module.register_module_forward_pre_hook(enter)]
    if leave is not None:
        handles.append(nn.modules.module.register_module_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _until_stopped(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return original(*args, **kwargs)
    except Stop:
        return None
