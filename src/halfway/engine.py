"""Probe the shallow layers, and make the model's next call reuse what the probe computed.

The engine connects the dispatch modes of `replay` with a real model: it stops the model at the cut, rehearses each
kind of step once, recognises the model call that belongs to a probe, and falls back to plain computation, saying
why, whenever that call is not the one that was prepared. It knows nothing about which samples are chosen, or why.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import batch
from .cost import Meter
from .plan import Plan, disagreement, tolerance
from .replay import Diverged, Guard, Memory, Recorder, Rehearsal, Replayer, Tape
from .snapshot import Attributes, HostRandom, TorchRandom
from .stats import Counters

# One operation, and the features at the cut, are computed and compared in every so many replayed steps.
SPOT_CHECK_EVERY = 16
# Differences beyond this many tolerances are errors, not rounding.
_ERROR = 4.0
# How many kinds of steps are remembered, and how many rehearsals are normal before it looks hopeless.
_PLANS = 64
_MANY_REHEARSALS = 16

_AUTOCAST = "autocast is not what it was in the probe"
# Expected once in the usual loop (autocast around the model's call, not around the blocker); no warning.
_FIRST_AUTOCAST = "the first call of the model showed that it runs under autocast"


class ReplayError(RuntimeError):
    """A replay was wrong, or was demanded (`reuse="replay"`) and is not possible."""


class _Stop(BaseException):
    """Raised at the cut to end a pass. A BaseException: no model's own `except` should swallow it."""


class Inputs(NamedTuple):
    """What goes to the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in batch.leaves(tuple(self)) if isinstance(leaf, Tensor)]


class Probe(NamedTuple):
    """The cut's output on all samples, the tape, and where the random generators were before."""

    features: Tensor
    tape: Tape
    host_random: HostRandom
    torch_random: TorchRandom

    def rewind(self) -> None:
        """Put the random generators back, as if the probe had never happened."""
        self.host_random.restore()
        self.torch_random.restore()


class _Pending(NamedTuple):
    """A probe that waits for its model call, and how to recognise that call."""

    probe: Probe
    plan: Plan
    indices: Tensor
    arguments: list[Any]
    versions: list[int]
    parameters: list[Any]
    autocast: tuple[bool, torch.dtype]
    spot: int | None


class Engine:
    """Runs one model up to one of its layers, and replays.

    Args:
        root: the innermost model, without wrappers.
        layer: the cut, a submodule of root.
        layer_name: its name, for messages.
        reuse: "auto", "replay" or "recompute".
        compiled: whether the model is called through torch.compile.
        counters: where steps and operations are counted.
    """

    def __init__(
        self, root: nn.Module, layer: nn.Module, layer_name: str, reuse: str, compiled: bool, counters: Counters
    ) -> None:
        self.root = root
        self.layer = layer
        self.layer_name = layer_name
        self.reuse = reuse
        self.compiled = compiled
        self.counters = counters
        self.shallow_share = 0.0
        self._signature = inspect.signature(root.forward)
        self._modules = list(root.modules())
        self._names = {m: n for n, m in root.named_modules()}
        self._shallow_modules = self._modules
        self._plans: dict[Any, Plan] = {}
        self._rehearsals = 0
        self._autocast: tuple[bool, torch.dtype] | None = None
        self._pending: _Pending | None = None
        self._approved = False
        self._armed = contextlib.ExitStack()
        self._warned: set[str] = set()
        self._mismatches: dict[str, Tensor] = {}

    # ---------------------------------------------------------------- probing

    def probe(self, inputs: Inputs, size: int) -> Probe:
        """Run the model up to the cut on all `size` samples.

        Afterwards parameters, buffers, inputs and attributes are what they were; only the random generators have
        moved, as a replay will not move them again (`Probe.rewind` takes that back too).
        """
        tensors = inputs.tensors()
        recorder = Recorder(self._memory(tensors), size, _foreign_hooks)
        host_random, torch_random = HostRandom(), TorchRandom(tensors[0].device)
        attributes = Attributes(self._shallow_modules)
        found: list[Any] = []

        def stop(module: nn.Module, args: Any, output: Any) -> None:
            found.append(output)
            raise _Stop

        try:
            with self._hooked(stop), self._passing(tensors[0]), recorder, contextlib.suppress(_Stop):
                self.root(*inputs.args, **inputs.kwargs)
        finally:
            recorder.undo()
            attributes.restore()
            if not found:
                host_random.restore()
                torch_random.restore()
        if recorder.wrote_input:
            recorder.tape.refuse("the model changes its input in place")
        if self.compiled:
            recorder.tape.refuse("the model is compiled (compile only its deep part to replay)")
        return Probe(self._features(found, size), recorder.tape, host_random, torch_random)

    def validate(self, inputs: Inputs, cut: Callable[[Tensor], Inputs], size: int, retained: int) -> None:
        """Find out on the first batch what would otherwise surface epochs later, and leave no trace.

        The cut must be reached, once, and give features; the step is rehearsed. On the way the whole forward pass is
        metered: how much of a training step is the shallow forward? `cut` gives the inputs of some of the samples.
        """
        entered: set[nn.Module] = {self.root}
        handle = nn.modules.module.register_module_forward_pre_hook(lambda m, _: entered.add(m))
        try:
            probe = self.probe(inputs, size)
        finally:
            handle.remove()
        self._shallow_modules = [m for m in self._modules if m in entered]
        indices = torch.arange(size - retained, size, device=probe.features.device)
        part = cut(indices)
        plan = self.plan(probe, inputs, part, indices) if retained < size else None
        probe.rewind()
        if self.reuse == "replay" and plan is not None and plan.refusal:
            raise ReplayError(self._demanded(plan.refusal))
        self._meter(part)

    def _meter(self, inputs: Inputs) -> None:
        tensors = inputs.tensors()
        guard, meter = Guard(self._memory(tensors)), Meter()
        attributes, host_random = Attributes(self._modules), HostRandom()
        torch_random = TorchRandom(tensors[0].device)
        visits = []

        def at_cut(module: nn.Module, args: Any, output: Any) -> None:
            visits.append(module)
            meter.reached_cut()

        try:
            with self._hooked(at_cut), self._passing(tensors[0]), meter, guard:
                self.root(*inputs.args, **inputs.kwargs)
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
        self.shallow_share = meter.shallow_share

    def _features(self, found: list[Any], size: int) -> Tensor:
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

    @contextlib.contextmanager
    def _passing(self, example: Tensor) -> Iterator[None]:
        """The circumstances of the model's call: autocast as in its last one, and grad enabled, for without grad many
        models run other operations. Nothing is saved for a backward pass that will never come."""
        device = example.device.type
        enabled, dtype = self._expected_autocast(example)
        with contextlib.ExitStack() as stack:
            if self.compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            torch.clear_autocast_cache()
            stack.callback(torch.clear_autocast_cache)
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_drop, _unavailable))
            yield

    @contextlib.contextmanager
    def _hooked(self, at_cut: Callable[[nn.Module, Any, Any], None]) -> Iterator[None]:
        handle = self.layer.register_forward_hook(at_cut)
        try:
            yield
        finally:
            handle.remove()

    # ------------------------------------------------------------- rehearsing

    def plan(self, probe: Probe, inputs: Inputs, part: Inputs, indices: Tensor) -> Plan:
        """The plan for steps like this one: a known one, or a new one from a rehearsal."""
        if self.reuse == "recompute":
            return Plan(refusal='reuse="recompute"')
        if probe.tape.refusal:
            return Plan(refusal=probe.tape.refusal)
        described = tuple((t.shape, t.stride(), t.dtype, t.device) for t in inputs.tensors())
        key = (len(indices), described, self._expected_autocast(inputs.tensors()[0]), probe.tape.signature())
        if key not in self._plans:
            if self._rehearsals > _MANY_REHEARSALS and self._rehearsals > self.counters.steps / 4:
                return Plan(refusal="the shallow part takes another path, or another input shape, in most steps")
            if len(self._plans) >= _PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = self._rehearse(probe, part, indices)
        return self._plans[key]

    def _rehearse(self, probe: Probe, part: Inputs, indices: Tensor) -> Plan:
        """Run the shallow part on the retained samples and compare every operation with the tape. Leaves no trace."""
        self._rehearsals += 1
        tensors = part.tensors()
        plan = Plan()
        entered = [""]
        rehearsal = Rehearsal(self._memory(tensors), probe.tape, plan, indices, lambda: entered[-1])
        attributes = Attributes(self._shallow_modules)
        host_random, torch_random = HostRandom(), TorchRandom(tensors[0].device)

        def enter(module: nn.Module, args: Any) -> None:
            entered.append(self._names.get(module, entered[-1]))

        def stop(module: nn.Module, args: Any, output: Tensor) -> None:
            rehearsal.finish()
            rehearsal.leave()
            expected = probe.features.index_select(0, indices).flatten(1)
            off = disagreement(expected, output.flatten(1)) / tolerance(output)
            if off > _ERROR:
                raise Diverged(f"the features of {self.layer_name!r} depend on the other samples of the batch")
            raise _Stop

        handle = nn.modules.module.register_module_forward_pre_hook(enter)
        probe.host_random.restore()
        try:
            with self._hooked(stop), self._passing(tensors[0]), rehearsal.entered(), contextlib.suppress(_Stop):
                self.root(*part.args, **part.kwargs)
        except Diverged as difference:
            plan.refusal = difference.reason
        finally:
            handle.remove()
            rehearsal.undo()
            attributes.restore()
            host_random.restore()
            torch_random.restore()
        return plan

    # -------------------------------------------------------------- replaying

    def watch(self, callback: Callable[[Tensor], None]) -> None:
        """Show the cut's output in the model's next training call to `callback`: no probe, nothing run twice."""
        self.release()
        if self.compiled:
            return

        def at_cut(module: nn.Module, args: Any, output: Any) -> None:
            if self.root.training and torch.is_grad_enabled():
                self.release()
                callback(self._features([output], len(output)))

        self._armed.enter_context(self._hooked(at_cut))
        self._armed.enter_context(self._listening(self._note_autocast))

    def recompute(self, reason: str, retained: int) -> None:
        """The next model call will compute everything itself."""
        self.release()
        self._fell_back(reason, retained)
        if not self.compiled:
            self._armed.enter_context(self._listening(self._note_autocast))

    def arm(self, probe: Probe, plan: Plan, part: Inputs, indices: Tensor) -> None:
        """Prepare the model's next training call, which must be on `part`, to replay."""
        self.release()
        tensors = part.tensors()
        drop = _weak_callback(self)
        arguments = self._bind(part.args, part.kwargs)
        assert arguments is not None
        self._pending = _Pending(
            probe=probe,
            plan=plan,
            indices=indices,
            arguments=[weakref.ref(a, drop) if isinstance(a, Tensor) else a for a in arguments],
            versions=[t._version for t in tensors],
            parameters=self._parameters(),
            autocast=self._expected_autocast(tensors[0]),
            spot=plan.spot(SPOT_CHECK_EVERY),
        )
        self._armed.enter_context(self._listening(self._approve))
        self._armed.enter_context(self._intercepting())
        handle = register_optimizer_step_post_hook(
            lambda *_: self.release("the optimizer stepped before the model was called")
        )
        self._armed.callback(handle.remove)

    def release(self, reason: str = "the model was not called on the retained samples") -> None:
        """Forget a pending tape, and free it."""
        pending, self._pending = self._pending, None
        self._approved = False
        self._armed.close()
        if pending is not None:
            self._fell_back(reason, len(pending.indices))

    @contextlib.contextmanager
    def _listening(self, hook: Callable[..., None]) -> Iterator[None]:
        # First in line, so that it sees what the user passed and not what other hooks make of it.
        handle = self.root.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def _intercepting(self) -> Iterator[None]:
        attributes = vars(self.root)
        patched = attributes.get("forward")
        original = self.root.forward
        attributes["forward"] = lambda *args, **kwargs: self._forward(original, args, kwargs)
        try:
            yield
        finally:
            if patched is None:
                del attributes["forward"]
            else:
                attributes["forward"] = patched

    def _note_autocast(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.root.training and torch.is_grad_enabled():
            tensors = Inputs(args, kwargs).tensors()
            if tensors:
                self._autocast = _autocast_state(tensors[0].device.type)

    def _approve(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Is this the call that was prepared? An evaluation in between is not, and does not end the waiting."""
        if not self.root.training or not torch.is_grad_enabled() or self._pending is None:
            return
        first_call = self._autocast is None
        self._note_autocast(module, args, kwargs)
        difference = self._difference(self._pending, args, kwargs)
        if difference:
            self.release(_FIRST_AUTOCAST if difference == _AUTOCAST and first_call else difference)
        else:
            self._approved = True

    def _difference(self, pending: _Pending, args: Any, kwargs: Any) -> str:
        arguments = self._bind(args, kwargs)
        expected = [a() if isinstance(a, weakref.ref) else a for a in pending.arguments]
        if arguments is None or len(arguments) != len(expected):
            return "the model was called with other arguments than the blocker saw"
        for found, handed_out in zip(arguments, expected, strict=True):
            if isinstance(found, Tensor) or isinstance(handed_out, Tensor):
                if found is not handed_out:
                    return (
                        "the model was not called with the tensors the blocker returned (move augmentation, mixup, "
                        ".to(device) and normalisation before the blocker)"
                    )
            elif not _equal(found, handed_out):
                return "the model was called with other arguments than the blocker saw"
        if [t._version for t in expected if isinstance(t, Tensor)] != pending.versions:
            return "the retained samples were changed in place before the model was called"
        if self._parameters() != pending.parameters:
            return "parameters or buffers changed between the blocker and the model's call"
        if _autocast_state(Inputs(args, kwargs).tensors()[0].device.type) != pending.autocast:
            return _AUTOCAST
        return ""

    def _forward(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The root's forward, for the one call that replays."""
        pending = self._pending
        if pending is None or not self._approved:
            return original(*args, **kwargs)
        self._pending = None
        self.release()
        now, attributes = HostRandom(), Attributes(self._shallow_modules)
        tensors = Inputs(args, kwargs).tensors()
        replayer = Replayer(self._memory(tensors), pending.probe.tape, pending.plan, pending.indices, pending.spot)
        pending.probe.host_random.restore()

        def at_cut(module: nn.Module, args: Any, output: Tensor) -> None:
            replayer.finish()
            replayer.leave()
            now.restore()
            self._count(replayer)
            self._audit(pending, replayer, output)

        try:
            with self._hooked(at_cut), replayer.entered():
                return original(*args, **kwargs)
        except Diverged as difference:
            replayer.undo()
            attributes.restore()
            now.restore()
            self._fell_back(difference.reason, len(pending.indices))
        return original(*args, **kwargs)

    def _count(self, replayer: Replayer) -> None:
        self.counters.replayed_steps += 1
        self.counters.operations_replayed += replayer.replayed
        self.counters.operations_computed += replayer.computed

    def _audit(self, pending: _Pending, replayer: Replayer, output: Tensor) -> None:
        """Remember, on the device, how far a checked operation and the features were off. `check` reads it."""
        if pending.spot is None:
            return
        expected = pending.probe.features.index_select(0, pending.indices).flatten(1)
        off = {f"the features of {self.layer_name!r}": disagreement(expected, output.detach().flatten(1))}
        if replayer.mismatch is not None:
            off[pending.plan.ops[pending.spot].describe()] = replayer.mismatch
        for what, mismatch in off.items():
            known = self._mismatches.get(what, torch.zeros_like(mismatch))
            self._mismatches[what] = torch.maximum(known, mismatch / tolerance(output))

    def check(self) -> None:
        """Raise if a spot check found a replay to be wrong. Waits for the device."""
        wrong = [what for what, mismatch in self._mismatches.items() if not mismatch <= _ERROR]
        self._mismatches.clear()
        if wrong:
            raise ReplayError(
                f"replayed and computed values differ: {', '.join(wrong)}. The shallow part does something halfway "
                'cannot see (it may mix samples of the batch); use ForwardBlocker(..., reuse="recompute")'
            )

    def _fell_back(self, reason: str, retained: int) -> None:
        self.counters.recomputed[reason] += 1
        self.counters.spent += retained * self.shallow_share
        if self.reuse == "recompute" or reason == _FIRST_AUTOCAST:
            return
        if self.reuse == "replay":
            raise ReplayError(self._demanded(reason))
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(
                f"halfway computes the shallow layers twice instead of replaying them: {reason}. Training is right but "
                "saves less (this is said once; `blocker.stats.recompute_reasons` counts it)",
                stacklevel=2,
            )

    def _demanded(self, reason: str) -> str:
        return f'reuse="replay" was demanded, but {reason}; change that or use reuse="auto"'

    # ---------------------------------------------------------------- bookkeeping

    def _tensors(self) -> Iterator[Tensor]:
        for module in self._modules:
            for tensors in (module._parameters, module._buffers):
                for t in tensors.values():
                    if t is not None:
                        yield t

    def _memory(self, inputs: list[Tensor]) -> Memory:
        return Memory(self._tensors(), inputs)

    def _parameters(self) -> list[Any]:
        return [(id(t), t.data_ptr(), t._version) for t in self._tensors()]

    def _expected_autocast(self, example: Tensor) -> tuple[bool, torch.dtype]:
        return self._autocast or _autocast_state(example.device.type)

    def _bind(self, args: Any, kwargs: Any) -> list[Any] | None:
        """The call's arguments as a flat list, the same however they are passed."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            return None
        return [x for name, value in bound.arguments.items() for x in (name, *batch.leaves(value))]


def _weak_callback(engine: Engine) -> Callable[[Any], None]:
    """Frees the tape when a tensor that was handed out dies: it cannot be replayed any more."""
    owner = weakref.ref(engine)

    def dropped(reference: Any) -> None:
        alive = owner()
        pending = alive._pending if alive else None
        if alive and pending and any(reference is a for a in pending.arguments):
            alive.release("the tensors the blocker returned were not passed to the model")

    return dropped


def _drop(t: Tensor) -> None:
    return None


def _unavailable(packed: Any) -> Tensor:
    raise RuntimeError("halfway: no backward pass through a probe")


def _foreign_hooks() -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0] is not _drop


def _autocast_state(device_type: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def _equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:
        return False
