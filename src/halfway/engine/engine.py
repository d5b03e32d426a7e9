"""Make the model's next call reuse what the probe computed.

The engine recognises the one model call that belongs to a probe and turns it into a replay. Whenever the call is not
the one that was prepared, or the replay does not line up, it falls back to plain computation and says why. It knows
nothing about which samples are chosen, or for what reason.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from ..batches.inputs import Inputs
from ..stats import Counters
from .flops import Meter
from .interception import Handler, Interception
from .plan import Plan, disagreement, tolerance
from .replay import Replayer
from .sandbox import HostRandom
from .shallow import ERROR, Probe, Seen, Shallow, autocast_state, failed
from .tape import Diverged

# One operation, and the features at the cut, are computed and compared in every so many replayed steps.
SPOT_CHECK_EVERY = 16

# From this share of the shallow FLOPs on it is said that something is computed because of other samples.
_WORTH_A_WARNING = 0.01

_AUTOCAST = "autocast is not what it was in the probe"
# Expected once in the usual loop (autocast around the model's call, not around the blocker); no warning.
_FIRST_AUTOCAST = "the first call of the model showed that it runs under autocast"
_NOT_CALLED = "the model was not called on the retained samples"
_OTHER_ARGUMENTS = "the model was called with other arguments than the blocker saw"
_OTHER_TENSORS = (
    "the model was not called with the tensors the blocker returned (move augmentation, mixup, .to(device) and "
    "normalisation before the blocker)"
)


class ReplayError(RuntimeError):
    """A replay was wrong, or was demanded (`reuse="replay"`) and is not possible."""


class _Pending(NamedTuple):
    """A probe that waits for its model call, and how to recognise that call."""

    probe: Probe
    plan: Plan
    indices: Tensor
    arguments: dict[str, list[Any]]
    more_arguments: bool
    versions: list[int]
    parameters: list[Any]
    autocast: tuple[bool, torch.dtype]
    audited: bool
    spot: int | None


class Engine:
    """Replays one model's shallow part, or has it computed.

    Args:
        shallow: the part to replay.
        reuse: "auto", "replay" or "recompute".
        counters: where steps, operations and costs are counted.

    Attributes:
        meter: the FLOPs of the model's first call; None before it.
    """

    def __init__(self, shallow: Shallow, reuse: str, counters: Counters) -> None:
        self.shallow = shallow
        self.reuse = reuse
        self.counters = counters
        self._root = shallow.root
        self._pending: _Pending | None = None
        self._first_call = True
        self._armed = contextlib.ExitStack()
        self._warned: set[str] = set()
        self._mismatches: dict[str, Tensor] = {}
        self._checked = 0
        self._distrusted = ""
        self._unsaid: list[tuple[str, int]] = []
        self._first: Probe | None = None
        self.meter: Meter | None = None
        self._metering: Meter | None = None
        # Samples whose shallow forward is not counted yet, one by one: a resumed run must add up to the same bits.
        self._unpriced: list[float] = []

    def validate(self, inputs: Inputs, cut: Callable[[Tensor], Inputs], size: int, retained: int) -> None:
        """Find out on the first batch what would otherwise surface epochs later.

        The cut must be reached and give features; the step is rehearsed, and a replay that was demanded must be
        possible. `cut` gives the inputs of some of the samples. If that batch is then probed, this was it.
        """
        probe = self.shallow.probe(inputs, size, self._unwanted())
        try:
            self.shallow.check(probe)
            if retained < size and self.reuse != "recompute":
                refusal = self.shallow.plan(probe, inputs, cut, retained).refusal
                if refusal and self.reuse == "replay":
                    raise ReplayError(self._demanded(refusal))
            if self.shallow.compiled:
                self._price(self.shallow.meter(cut(torch.arange(retained, device=probe.features.device))))
        except BaseException:
            probe.rewind()
            raise
        self._first = probe

    def discard(self) -> None:
        """The batch that was validated will not be probed: as if it never had been."""
        first, self._first = self._first, None
        if first is not None:
            first.rewind()

    def probe(self, inputs: Inputs, size: int) -> Probe:
        """Run the shallow part on all samples; recorded only if a replay is wanted."""
        first, self._first = self._first, None
        return first or self.shallow.probe(inputs, size, self._unwanted())

    def _unwanted(self) -> str:
        """Why nothing needs to be recorded."""
        return 'reuse="recompute"' if self.reuse == "recompute" else self._distrusted

    def plan(self, probe: Probe, inputs: Inputs, cut: Callable[[Tensor], Inputs], retained: int) -> Plan:
        """How to reuse a probe for some of its samples; `cut` gives their inputs. May run the model (a rehearsal)."""
        return self.shallow.plan(probe, inputs, cut, retained)

    def prepare(self, probe: Probe, plan: Plan, part: Inputs, indices: Tensor) -> None:
        """Get ready for the model's call on `part`: to replay, or else to compute."""
        if plan.refusal:
            probe.rewind()
            self._recompute(plan.refusal, len(indices))
        else:
            self._arm(probe, plan, part, indices)
            share, why = plan.mixed()
            if share > _WORTH_A_WARNING and why not in self._warned:
                self._warned.add(why)
                warnings.warn(
                    f"halfway computes {share:.0%} of the shallow layers twice instead of replaying them: they follow "
                    f"{why}, and so depend on other samples of the batch. Training is right but saves less "
                    "(`blocker.explain()` lists the operations; this is said once)",
                    stacklevel=5,
                )

    def watch(self, size: int, callback: Callable[[Seen], None]) -> None:
        """Show the cut's output in the model's next training call to `callback`: no probe, nothing run twice."""
        self.release()
        if self.shallow.compiled:
            return

        def at_cut(module: nn.Module, args: Any, output: Any) -> None:
            # What the selector computes is not the model's.
            with _disable_current_modes() if self._metering else contextlib.nullcontext():
                callback(self.shallow.seen([output], size))

        def called(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            self._disarm()
            with self.shallow.hooked(at_cut):
                return original(*args, **kwargs)

        self._await_call(called)

    def _recompute(self, reason: str, retained: int) -> None:
        """The next model call will compute everything itself."""
        self.release()
        self._fell_back(reason, retained)

        def called(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            self._disarm()
            return original(*args, **kwargs)

        if not self.shallow.compiled:
            self._await_call(called)

    def _arm(self, probe: Probe, plan: Plan, part: Inputs, indices: Tensor) -> None:
        """Prepare the model's next training call, which must be on `part`, to replay."""
        self.release()
        tensors = part.tensors()
        drop = _weak_callback(self)
        arguments = self.shallow.forward.bind(part.args, part.kwargs)
        assert arguments is not None
        turn = (self.counters.steps + 1) % SPOT_CHECK_EVERY
        self._pending = _Pending(
            probe=probe,
            plan=plan,
            indices=indices,
            arguments={
                name: [weakref.ref(a, drop) if isinstance(a, Tensor) else a for a in values]
                for name, values in arguments.items()
            },
            more_arguments=part.more,
            versions=[a._version for values in arguments.values() for a in values if isinstance(a, Tensor)],
            parameters=self.shallow.footprint.fingerprint(),
            autocast=self.shallow.expected_autocast(tensors[0]),
            audited=not turn,
            spot=None if turn else plan.spot(self.counters.steps // SPOT_CHECK_EVERY),
        )
        self._await_call(self._called)
        self._armed.callback(register_optimizer_step_post_hook(self._stepped).remove)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer's step makes the tape stale, if it is an optimizer of this model."""
        mine = {id(t) for t in self.shallow.footprint.tensors()}
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            self.release("the optimizer stepped before the model was called")

    def release(self, reason: str = _NOT_CALLED, *, demanded: bool = False) -> None:
        """Forget a pending tape, and free it. A probe that is never used is no error, even if replays are demanded."""
        self.discard()
        pending = self._disarm()
        self._say()
        if pending is not None:
            self._fell_back(reason, len(pending.indices), demanded=demanded)

    def lose(self) -> None:
        """`release` from a callback, where nothing may be raised, not even a warning: that is left for later."""
        pending = self._disarm()
        if pending is not None:
            self._unsaid.append((_OTHER_TENSORS, len(pending.indices)))

    def _disarm(self) -> _Pending | None:
        pending, self._pending = self._pending, None
        self._armed.close()
        return pending

    def _say(self) -> None:
        while self._unsaid:
            self._fell_back(*self._unsaid.pop(), demanded=False)

    def forget(self) -> None:
        """Let go of the model, without a word about a probe that is pending."""
        self._disarm()
        self._unsaid.clear()

    def _await_call(self, handler: Handler) -> None:
        """Have `handler` take the model's next training call, before any hook of the model has seen it. An evaluation
        in between is not meant, and does not end the waiting."""

        def called(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if not self._root.training or not torch.is_grad_enabled():
                return original(*args, **kwargs)
            tensors = Inputs(args, kwargs).tensors()
            self._first_call = self.shallow.autocast is None
            if tensors:
                self.shallow.autocast = autocast_state(tensors[0].device.type)
            return handler(original if self.meter else self._metered(original), args, kwargs)

        self._armed.callback(Interception(self._root, "_call_impl", called).remove)

    def _metered(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The model's first call, of which the FLOPs are counted on the way."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._metering = Meter()
            try:
                with self.shallow.metered(self._metering), _eager(self.shallow):
                    output = original(*args, **kwargs)
                self._price(self._metering)
            finally:
                self._metering = None
            return output

        return call

    def spend(self, samples: float) -> None:
        """The shallow forward of so many samples, beside what is counted for the retained ones."""
        self._unpriced.append(samples)
        self._price(self.meter)

    def _price(self, meter: Meter | None) -> None:
        """Count what the shallow part has cost, as soon as it is known how that compares with a whole step."""
        self.meter = meter
        if meter is not None:
            for samples in self._unpriced:
                self.counters.spent += samples * meter.shallow_share
            self._unpriced.clear()

    def _called(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Is this the call that was prepared? Then its forward is a replay."""
        assert self._pending is not None
        difference = self._difference(self._pending, args, kwargs)
        if difference:
            reason = _FIRST_AUTOCAST if difference == _AUTOCAST and self._first_call else difference
            self.release(reason, demanded=True)
            return original(*args, **kwargs)
        pending = self._disarm()
        assert pending is not None
        return self._replay(pending, original, args, kwargs)

    def _difference(self, pending: _Pending, args: Any, kwargs: Any) -> str:
        arguments = self.shallow.forward.bind(args, kwargs)
        if arguments is None or (not pending.more_arguments and set(arguments) != set(pending.arguments)):
            return _OTHER_ARGUMENTS
        versions = []
        for name, values in pending.arguments.items():
            found = arguments.get(name, ())
            if len(found) != len(values):
                return _OTHER_ARGUMENTS
            for given, value in zip(found, values, strict=True):
                handed_out = value() if isinstance(value, weakref.ref) else value
                if given is not handed_out and (isinstance(given, Tensor) or isinstance(handed_out, Tensor)):
                    return _OTHER_TENSORS
                if isinstance(given, Tensor):
                    versions.append(given._version)
                elif not _equal(given, handed_out):
                    return _OTHER_ARGUMENTS
        if versions != pending.versions:
            return "the retained samples were changed in place before the model was called"
        if self.shallow.footprint.fingerprint() != pending.parameters:
            return "parameters or buffers changed between the blocker and the model's call"
        if autocast_state(Inputs(args, kwargs).tensors()[0].device.type) != pending.autocast:
            return _AUTOCAST
        return ""

    def _replay(self, pending: _Pending, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The one call that replays; if it does not line up, its forward runs as usual."""
        shallow = self.shallow
        tensors = Inputs(args, kwargs).tensors()
        replayer = Replayer(tensors, pending.probe.tape, pending.plan, pending.indices, pending.spot)
        replayer.open_ended = shallow.whole and pending.more_arguments
        finished = given_up = False

        def at_cut(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal finished
            if finished or given_up:  # the root's own hook, after its forward; or the forward that runs instead
                return
            replayer.finish()
            replayer.leave()
            replayer.move_statistics()
            now.restore()
            finished = True
            self._count(pending, replayer)
            self._audit(pending, replayer, output)

        def forward(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            nonlocal given_up
            replayer.meter = self._metering
            pending.probe.host_random.restore()
            try:
                with replayer.entered():
                    output = original(*args, **kwargs)
                    if shallow.whole:
                        at_cut(self._root, args, output)
                replayer.check()
                return output
            except Diverged as difference:
                failure, reason = None, difference.reason
            except Exception as error:
                if finished:
                    raise
                failure, reason = error, failed(error)
            given_up = True
            replayer.undo()
            before.restore()
            now.restore()
            if failure is None:
                self._fell_back(reason, len(pending.indices))
                return original(*args, **kwargs)
            output = original(*args, **kwargs)  # raises the same, if it was the model's own failure
            self._fell_back(reason, len(pending.indices))
            return output

        with shallow.hooked(at_cut):
            shallow.footprint.refresh(data=False)  # that was compared a moment ago
            now, before = HostRandom(), shallow.footprint.save()
            with Interception(self._root, "forward", forward):
                return original(*args, **kwargs)

    def _count(self, pending: _Pending, replayer: Replayer) -> None:
        self.counters.replayed_steps += 1
        self.counters.operations_replayed += replayer.replayed
        self.counters.operations_computed += replayer.computed
        if replayer.computed_flops:
            self.spend(len(pending.indices) * replayer.computed_flops / pending.plan.flops())

    def _audit(self, pending: _Pending, replayer: Replayer, output: Any) -> None:
        """Remember, on the device, how far a checked operation and the features were off. `check` reads it."""
        if not pending.audited:
            return
        if pending.plan.mixed_features:
            return
        found = self.shallow.features([output], len(pending.indices))
        expected = pending.probe.features.index_select(0, pending.indices).flatten(1)
        off = {f"the features of {self.shallow.layer_name!r}": disagreement(expected, found.flatten(1))}
        if pending.spot is not None and replayer.mismatch is not None:
            off[pending.plan.ops[pending.spot].describe()] = replayer.mismatch
        for what, mismatch in off.items():
            known = self._mismatches.get(what, torch.zeros_like(mismatch))
            self._mismatches[what] = torch.maximum(known, mismatch / tolerance(found))

    def check(self) -> None:
        """What a spot check found to be wrong: an error if replays are demanded, otherwise there are no more of them.
        Waits for the device."""
        self._say()
        wrong = [what for what, mismatch in self._mismatches.items() if not mismatch <= ERROR]
        self._mismatches.clear()
        since, self._checked = self._checked, self.counters.steps
        if not wrong:
            return
        found = (
            f"replayed and computed values differ: {', '.join(wrong)}; seen between steps {since} and {self._checked}. "
            "The shallow part does something halfway cannot see (it may mix samples of the batch)"
        )
        if self.reuse == "replay":
            raise ReplayError(f'{found}; use ForwardBlocker(..., reuse="recompute")')
        self._distrusted = "a spot check found that replayed and computed values differ"
        self._warned.add(self._distrusted)
        self.release()
        warnings.warn(
            f"{found}. From now on the shallow layers are computed twice instead; steps since then may have had wrong "
            'gradients. Use ForwardBlocker(..., reuse="recompute") from the start',
            stacklevel=2,
        )

    def _fell_back(self, reason: str, retained: int, demanded: bool = True) -> None:
        self.counters.recomputed[reason] += 1
        if reason != _NOT_CALLED:
            self.spend(retained)
        if self.reuse == "recompute" or reason == _FIRST_AUTOCAST:
            return
        if self.reuse == "replay" and demanded:
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


def autocast_in_words(state: tuple[bool, torch.dtype] | None) -> str:
    """For a checkpoint: "" if nothing is known yet."""
    return "" if state is None else f"{'on' if state[0] else 'off'} {str(state[1]).removeprefix('torch.')}"


def autocast_from_words(words: Any) -> tuple[bool, torch.dtype] | None:
    """The inverse of `autocast_in_words`."""
    if words == "":
        return None
    state, _, name = str(words).partition(" ")
    dtype = getattr(torch, name, None) if name else None
    if state not in ("on", "off") or not isinstance(dtype, torch.dtype):
        raise ValueError(f"this is not the state_dict of a ForwardBlocker: its autocast is {words!r}")
    return state == "on", dtype


def _weak_callback(engine: Engine) -> Callable[[Any], None]:
    """Frees the tape when a tensor that was handed out dies: it cannot be replayed any more."""
    owner = weakref.ref(engine)

    def dropped(reference: Any) -> None:
        alive = owner()
        pending = alive._pending if alive else None
        if alive and pending and any(reference is a for values in pending.arguments.values() for a in values):
            alive.lose()

    return dropped


def _eager(shallow: Shallow) -> contextlib.AbstractContextManager[Any]:
    """Compiled parts must not meet a dispatch mode: some versions never compile them again."""
    return torch.compiler.set_stance("force_eager") if shallow.has_compiled_parts() else contextlib.nullcontext()


def _equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:
        return False
