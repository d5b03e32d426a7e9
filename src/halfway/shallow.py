"""Running the shallow part of a model: probes, rehearsals, and the validation on the first batch.

The shallow part ends at a layer, or is the whole model, and then only the backward pass is saved. All of these run the
user's model, or that part of it, and leave no trace but what they return.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from . import batch
from .flops import Meter
from .guard import Guard, Memory, address, no_graph
from .inputs import Forward, Inputs
from .interception import Interception
from .modules import is_compiled
from .plan import Plan, disagreement, tolerance
from .replay import Diverged, Recorder, Rehearsal, Tape
from .selectors.base import not_finite
from .sharding import local, sharded
from .snapshot import Attributes, HostRandom, TorchRandom

# Differences beyond this many tolerances are errors, not rounding.
ERROR = 4.0
# How many kinds of steps are remembered, and how many rehearsals are normal before it looks hopeless.
_PLANS = 64
_MANY_REHEARSALS = 16


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


class Probe(NamedTuple):
    """What was seen, the tape, and where the random generators were before."""

    seen: Seen
    tape: Tape
    host_random: HostRandom
    torch_random: TorchRandom

    @property
    def features(self) -> Tensor:
        return self.seen.features

    def rewind(self) -> None:
        """Put the random generators back, as if the probe had never happened."""
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

    Attributes:
        several_ranks: whether other processes train the same model, and may exchange its buffers.
        share: the shallow forward relative to a whole training step, in FLOPs; known after `validate`.
        autocast: the state of autocast in the model's last training call; None before the first.
    """

    def __init__(
        self, root: nn.Module, layer: nn.Module, layer_name: str, compiled: bool, watched: nn.Module | None = None
    ) -> None:
        self.root = root
        self.layer = layer
        self.whole = layer is root
        self.watched = watched
        self.layer_name = layer_name
        self.compiled = compiled
        self.several_ranks = False
        self.share = 0.0
        self.autocast: tuple[bool, torch.dtype] | None = None
        # The modules that run before the cut: all of them until the first probe has shown which.
        self.modules = list(root.modules())
        self._all_modules = self.modules
        self._names = {m: n for n, m in root.named_modules()}
        self.forward = Forward(root)
        self._plans: dict[Any, Plan] = {}
        self._probes = self._rehearsals = 0

    def probe(self, inputs: Inputs, size: int, refusal: str = "") -> Probe:
        """Run the model up to the cut on all `size` samples. `refusal`: why it need not be recorded, if it need not.

        Afterwards parameters, buffers, inputs and attributes are what they were; only the random generators have
        moved, as a replay will not move them again (`Probe.rewind` takes that back too).
        """
        self._probes += 1
        tensors = inputs.tensors()
        recorder = Recorder(self.memory(tensors), size)
        refusal = refusal or self._refusal()
        if refusal:
            recorder.tape.refuse(refusal)
        host_random, torch_random = HostRandom(), TorchRandom(tensors[0].device)
        attributes = Attributes(self.modules)
        found: list[Any] = []

        def stop(module: nn.Module, args: Any, output: Any) -> None:
            found.append(output)
            raise Stop

        seen: Seen | None = None
        try:
            with self.hooked(stop), self._watching() as watched, self._passing(tensors[0]), recorder:
                self._run(inputs)
            seen = self.seen(found, size, watched)
            if self.several_ranks and not recorder.written <= self._statistics():
                # DDP's broadcast_buffers does so right before the forward, and does not always show in a version.
                recorder.tape.refuse("the shallow part writes buffers of its own, which ranks exchange before the call")
        finally:
            recorder.undo()
            attributes.restore()
            if seen is None:
                host_random.restore()
                torch_random.restore()
        if recorder.wrote_input:
            recorder.tape.refuse("the model changes its input in place")
        return Probe(seen, recorder.tape, host_random, torch_random)

    def validate(
        self, inputs: Inputs, cut: Callable[[Tensor], Inputs], size: int, retained: int, rehearse: bool
    ) -> str:
        """Find out on the first batch what would otherwise surface epochs later, and leave no trace.

        The cut must be reached, once, and give features; the step is rehearsed. On the way the whole forward pass is
        metered: how much of a training step is the shallow forward? `cut` gives the inputs of some of the samples.

        Returns why steps like this one cannot be replayed, or "".
        """
        refusal = ""
        entered: set[nn.Module] = {self.root}
        handle = nn.modules.module.register_module_forward_pre_hook(lambda m, _: entered.add(m))
        try:
            probe = self.probe(inputs, size, "" if rehearse else "not to be rehearsed")
        finally:
            handle.remove()
        self.modules = [m for m in self._all_modules if m in entered]
        try:
            if not probe.features.isfinite().all():
                raise FloatingPointError(not_finite(self.layer_name))
            if rehearse and retained < size:
                refusal = self.plan(probe, inputs, cut, retained).refusal
        finally:
            probe.rewind()
        self._meter(cut(rehearsed_rows(size, retained).to(probe.features.device)))
        return refusal

    def _meter(self, inputs: Inputs) -> None:
        tensors = inputs.tensors()
        guard, meter = Guard(self.memory(tensors)), Meter()
        attributes, host_random = Attributes(self._all_modules), HostRandom()
        torch_random = TorchRandom(tensors[0].device)
        visits = []

        def at_cut(module: nn.Module, args: Any, output: Any) -> None:
            visits.append(module)
            meter.reached_cut()

        try:
            with self.hooked(at_cut), self._passing(tensors[0]), meter, guard:
                self._run(inputs)
        finally:
            guard.undo()
            attributes.restore()
            host_random.restore()
            torch_random.restore()
        if len(visits) > 1:
            raise ValueError(
                f"layer {self.layer_name!r} runs {len(visits)} times in one forward pass, so it is no place to cut; "
                "choose one that runs once (`halfway layers` lists them)"
            )
        self.share = meter.shallow_share

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
        if not found:
            raise ValueError(
                f"layer {name!r} never runs in the model's forward pass, so nothing can be cut there; choose one that "
                "does (`halfway layers` lists them)"
            )
        features = found[0]
        if not isinstance(features, Tensor):
            raise TypeError(
                f"layer {name!r} returns a {type(features).__name__}, not a tensor; cut at one of its submodules, or "
                "at another layer (`halfway layers` lists those that return a tensor)"
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

    def _refusal(self) -> str:
        if self.compiled:
            return "the model is compiled (compile only its deep part to replay)"
        if any(map(is_compiled, self.modules)):
            return "the shallow part is compiled (compile only the deep part to replay)"
        if sharded(self.root):
            # A rehearsal, or a replay that diverges, runs layers once more. On one rank alone that would be a hang.
            return "the model is sharded by FSDP2, whose ranks must run every layer equally often"
        return ""

    def _run(self, inputs: Inputs) -> None:
        """Call the model, until somebody raises `Stop` or to its end.

        FSDP2 expects every forward to return, and a backward pass before the weights change: it sees the one, and is
        told that the other will not come.
        """
        shards = sharded(self.root)
        with contextlib.suppress(Stop), contextlib.ExitStack() as stack:
            if shards:
                stack.enter_context(Interception(self.root, "forward", _until_stopped))
            self.root(*inputs.args, **inputs.kwargs)
        for shard in shards:
            shard.reshard()

    @contextlib.contextmanager
    def _passing(self, example: Tensor) -> Iterator[None]:
        """The circumstances of the model's call: autocast as in its last one, and grad enabled, for without grad many
        models run other operations. Nothing is saved for a backward pass that will never come."""
        device = example.device.type
        enabled, dtype = self.expected_autocast(example)
        with contextlib.ExitStack() as stack:
            if self.compiled or any(map(is_compiled, self._all_modules)):
                # Also for a deep part: some versions never compile again what they once met under a dispatch mode.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(no_graph())
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            yield

    @contextlib.contextmanager
    def _watching(self) -> Iterator[list[Tensor]]:
        """Collects what enters the watched module."""
        found: list[Tensor] = []
        if self.watched is None:
            yield found
            return

        def entering(module: nn.Module, args: Any) -> None:
            if args and isinstance(args[0], Tensor):
                found.append(args[0].detach())

        handle = self.watched.register_forward_pre_hook(entering)
        try:
            yield found
        finally:
            handle.remove()

    @contextlib.contextmanager
    def hooked(self, at_cut: Callable[[nn.Module, Any, Any], None]) -> Iterator[None]:
        handle = self.layer.register_forward_hook(at_cut)
        try:
            yield
        finally:
            handle.remove()

    def plan(self, probe: Probe, inputs: Inputs, cut: Callable[[Tensor], Inputs], retained: int) -> Plan:
        """The plan for steps like this one: a known one, or a new one from a rehearsal."""
        if probe.tape.refusal:
            return Plan(refusal=probe.tape.refusal)
        described = tuple((t.shape, t.stride(), t.dtype, t.device) for t in inputs.tensors())
        key = (retained, described, self.expected_autocast(inputs.tensors()[0]), probe.tape.signature())
        if key not in self._plans:
            if self._rehearsals > _MANY_REHEARSALS and self._rehearsals > self._probes / 4:
                return Plan(refusal="the shallow part takes another path, or another input shape, in most steps")
            if len(self._plans) >= _PLANS:
                del self._plans[next(iter(self._plans))]
            indices = rehearsed_rows(probe.tape.size, retained).to(probe.features.device)
            self._plans[key] = self._rehearse(probe, cut(indices), indices)
        return self._plans[key]

    def _rehearse(self, probe: Probe, part: Inputs, indices: Tensor) -> Plan:
        """Run the shallow part on some of the samples and compare every operation with the tape. Leaves no trace."""
        self._rehearsals += 1
        tensors = part.tensors()
        plan = Plan()
        entered = [""]
        rehearsal = Rehearsal(self.memory(tensors), probe.tape, plan, indices, lambda: entered[-1])
        attributes = Attributes(self.modules)
        host_random, torch_random = HostRandom(), TorchRandom(tensors[0].device)

        def enter(module: nn.Module, args: Any) -> None:
            entered.append(self._names.get(module, entered[-1]))

        def stop(module: nn.Module, args: Any, output: Any) -> None:
            rehearsal.finish()
            rehearsal.leave()
            found = self.features([output], len(indices))
            expected = probe.features.index_select(0, indices).flatten(1)
            off = disagreement(expected, found.flatten(1)) / tolerance(found)
            if off > ERROR:
                raise Diverged(f"the features of {self.layer_name!r} depend on the other samples of the batch")
            raise Stop

        handle = nn.modules.module.register_module_forward_pre_hook(enter)
        probe.host_random.restore()
        try:
            with self.hooked(stop), self._passing(tensors[0]), rehearsal.entered():
                self._run(part)
        except Diverged as difference:
            plan.refusal = difference.reason
        finally:
            handle.remove()
            rehearsal.undo()
            attributes.restore()
            host_random.restore()
            torch_random.restore()
        return plan

    def _tensors(self, statistics: bool = True) -> Iterator[Tensor]:
        for module in self._all_modules:
            owned: list[Mapping[str, Tensor | None]] = [module._parameters]
            if statistics or not _keeps_statistics(module):
                owned.append(module._buffers)
            for tensors in owned:
                for t in tensors.values():
                    if t is not None:
                        yield t

    def memory(self, inputs: list[Tensor]) -> Memory:
        return Memory(self._tensors(), inputs)

    def fingerprint(self) -> list[Any]:
        """Changes when a parameter or buffer does; the statistics that training-mode BatchNorm only writes aside."""
        return [(id(t), local(t).data_ptr(), t._version) for t in self._tensors(statistics=False)]

    def _statistics(self) -> set[int]:
        norms = filter(_keeps_statistics, self._all_modules)
        return {address(b) for m in norms for b in m._buffers.values() if b is not None}

    def expected_autocast(self, example: Tensor) -> tuple[bool, torch.dtype]:
        return self.autocast or autocast_state(example.device.type)


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training


def rehearsed_rows(size: int, retained: int) -> Tensor:
    """(S,) sorted rows of N, always the same ones. Scattered, or an operation that rolls the batch would show in one
    row only; not symmetric, or one that flips it would not show at all."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(16):
        rows = torch.randperm(size, generator=generator)[:retained].sort().values
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
