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
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from ..batches.inputs import Call, Inputs
from ..errors import ReplayError
from ..stats import Counters
from . import spot_checks
from .autocast import Autocast
from .cut import Cut, Seen
from .fallbacks import FIRST_AUTOCAST, NOT_CALLED, Fallbacks
from .flops import Meter
from .interception import Handler, Interception
from .pending import AUTOCAST, OTHER_TENSORS, Pending
from .plan import Plan
from .probe import Probe, Prober
from .proof import Prover, failed
from .replay import Replayer
from .sandbox import HostRandom
from .spot_checks import SpotChecks
from .tape import Diverged


class Engine:
    """Replays one model's shallow part, or has it computed.

    Args:
        cut: where the shallow part ends.
        reuse: "auto", "replay" or "recompute".
        counters: where steps, operations and costs are counted.
        several_ranks: whether other processes train the same model.

    Attributes:
        meter: the FLOPs of the model's first call; None before it.
    """

    def __init__(self, cut: Cut, reuse: str, counters: Counters, several_ranks: bool) -> None:
        self._cut = cut
        self._root = cut.root
        self._reuse = reuse
        self._counters = counters
        self._prober = Prober(cut, several_ranks)
        self._prover = Prover(self._prober)
        self._fallbacks = Fallbacks(reuse, counters)
        self._checks = SpotChecks(cut)
        self._checked_until = 0
        self._distrusted = ""
        self._first: Probe | None = None
        self._pending: Pending | None = None
        self._armed = contextlib.ExitStack()
        self._first_call = True
        self.meter: Meter | None = None
        self._metering: Meter | None = None

    @property
    def autocast(self) -> Autocast:
        """What autocast was in the model's last training call: the only state that a checkpoint needs."""
        return self._prober.autocast

    # ------------------------------------------------------- before the model's call

    def validate(self, call: Call, retained: int) -> None:
        """Find out on the first batch what would otherwise surface epochs later.

        The cut must be reached and give features; the step is rehearsed, and a replay that was demanded must be
        possible. If that batch is then probed, this was it.
        """
        probe = self._prober.probe(call.inputs, call.size, self._unwanted())
        try:
            self._cut.check_finite(probe.features)
            if retained < call.size and self._reuse != "recompute":
                refusal = self._prover.plan(probe, call, retained).refusal
                if refusal and self._reuse == "replay":
                    raise self._fallbacks.error(refusal)
            if self._cut.compiled:
                part = call.part(torch.arange(retained, device=probe.features.device))
                self._price(self._prober.meter(part.inputs))
        except BaseException:
            probe.rewind()
            raise
        self._first = probe

    def probe(self, call: Call) -> Probe:
        """Run the shallow part on all samples; recorded only if a replay is wanted."""
        first, self._first = self._first, None
        return first or self._prober.probe(call.inputs, call.size, self._unwanted())

    def _unwanted(self) -> str:
        """Why nothing needs to be recorded."""
        return 'reuse="recompute"' if self._reuse == "recompute" else self._distrusted

    def plan(self, probe: Probe, call: Call, retained: int) -> Plan:
        """How to reuse a probe for so many of its samples. May run the model (a rehearsal)."""
        return self._prover.plan(probe, call, retained)

    def prepare(self, probe: Probe, plan: Plan, part: Call, indices: Tensor) -> None:
        """Get ready for the model's call on `part`, the samples at `indices`: to replay, or else to compute."""
        self.drop()
        if plan.refusal:
            probe.rewind()
            self._fallbacks.count(plan.refusal, len(indices))
            if not self._cut.compiled:
                self._await_call(self._called_plainly)
            return
        turn = (self._counters.steps + 1) % spot_checks.EVERY
        spot = None if turn else plan.spot(self._counters.steps // spot_checks.EVERY)
        self._pending = Pending(probe, plan, part, indices, self._prober, _lost_by(self), spot, not turn)
        self._await_call(self._called)
        self._armed.callback(register_optimizer_step_post_hook(self._stepped).remove)
        self._fallbacks.partly(plan)

    def watch(self, size: int, callback: Callable[[Seen], None]) -> None:
        """Show the cut's output in the model's next training call to `callback`: no probe, nothing run twice."""
        self.drop()
        if self._cut.compiled:
            return

        def at_cut(module: nn.Module, args: Any, output: Any) -> None:
            # What the selector computes is not the model's.
            with _disable_current_modes() if self._metering else contextlib.nullcontext():
                callback(self._cut.seen([output], size))

        def called(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            self._disarm()
            with self._cut.hooked(at_cut):
                return original(*args, **kwargs)

        self._await_call(called)

    # -------------------------------------------------- nothing is waited for any more

    def drop(self, reason: str = NOT_CALLED, *, demanded: bool = False) -> None:
        """Free a pending tape. A probe that is never used is no error, even if replays are demanded; and a batch that
        was validated but is not probed leaves no trace."""
        first, self._first = self._first, None
        if first is not None:
            first.rewind()
        pending = self._disarm()
        self._fallbacks.settle()
        if pending is not None:
            self._fallbacks.count(reason, len(pending.indices), demanded=demanded)

    def close(self) -> None:
        """Let go of the model, without a word about a probe that is pending."""
        self._disarm()
        self._fallbacks.forget()

    def _disarm(self) -> Pending | None:
        pending, self._pending = self._pending, None
        self._armed.close()
        return pending

    def _lost(self, pending: Pending) -> None:
        """The retained samples were freed: their call cannot come any more."""
        if pending is self._pending:
            self._disarm()
            self._fallbacks.count_later(OTHER_TENSORS, len(pending.indices))

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer's step makes the tape stale, if it is an optimizer of this model."""
        mine = {id(t) for t in self._prober.footprint.tensors()}
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            self.drop("the optimizer stepped before the model was called")

    # ------------------------------------------------------------- the model's call

    def _await_call(self, handler: Handler) -> None:
        """Have `handler` take the model's next training call, before any hook of the model has seen it. A call in eval
        mode or without grad is let through, and the waiting goes on."""

        def called(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if not self._root.training or not torch.is_grad_enabled():
                return original(*args, **kwargs)
            tensors = Inputs(args, kwargs).tensors()
            self._first_call = self.autocast.last is None
            if tensors:
                self.autocast.called(tensors[0].device)
            return handler(original if self.meter else self._metered(original), args, kwargs)

        self._armed.callback(Interception(self._root, "_call_impl", called).remove)

    def _metered(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The model's first call, of which the FLOPs are counted on the way."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._metering = Meter()
            try:
                with self._prober.metered(self._metering), self._prober.eager():
                    output = original(*args, **kwargs)
                self._price(self._metering)
            finally:
                self._metering = None
            return output

        return call

    def _price(self, meter: Meter) -> None:
        self.meter = meter
        self._counters.price(meter.shallow_share)

    def _called_plainly(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._disarm()
        return original(*args, **kwargs)

    def _called(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Is this the call that was prepared? Then its forward is a replay."""
        assert self._pending is not None
        difference = self._pending.difference(args, kwargs)
        if difference:
            self.drop(FIRST_AUTOCAST if difference == AUTOCAST and self._first_call else difference, demanded=True)
            return original(*args, **kwargs)
        pending = self._disarm()
        assert pending is not None
        return self._replay(pending, original, args, kwargs)

    def _replay(self, pending: Pending, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The one call that replays; if it does not line up, its forward runs as usual."""
        cut, footprint = self._cut, self._prober.footprint
        tensors = Inputs(args, kwargs).tensors()
        replayer = Replayer(tensors, pending.probe.tape, pending.plan, pending.indices, pending.spot)
        replayer.open_ended = cut.at_output and pending.more_arguments
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
            self._checks.compare(pending, replayer, output)

        def forward(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            nonlocal given_up
            replayer.meter = self._metering
            pending.probe.host_random.restore()
            try:
                with replayer.entered():
                    output = original(*args, **kwargs)
                    if cut.at_output:
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
                self._fallbacks.count(reason, len(pending.indices))
                return original(*args, **kwargs)
            output = original(*args, **kwargs)  # raises the same, if it was the model's own failure
            self._fallbacks.count(reason, len(pending.indices))
            return output

        with cut.hooked(at_cut):
            footprint.refresh(data=False)  # that was compared a moment ago
            now, before = HostRandom(), footprint.save()
            with Interception(self._root, "forward", forward):
                return original(*args, **kwargs)

    def _count(self, pending: Pending, replayer: Replayer) -> None:
        counters = self._counters
        counters.replayed_steps += 1
        counters.operations_replayed += replayer.replayed
        counters.operations_computed += replayer.computed
        if replayer.computed_flops:
            counters.spend_shallow(len(pending.indices) * replayer.computed_flops / pending.plan.flops())

    # ------------------------------------------------------------------- afterwards

    def explain(self) -> str:
        """What the last pruned step replayed, and what it computed, as a table."""
        plan = self._prover.last
        return plan.explain() if plan is not None else "no batch has been pruned yet"

    def check(self) -> None:
        """What a spot check found to be wrong: an error if replays are demanded, otherwise there are no more of them.
        Waits for the device."""
        self._fallbacks.settle()
        wrong = self._checks.wrong()
        since, self._checked_until = self._checked_until, self._counters.steps
        if not wrong:
            return
        found = (
            f"replayed and computed values differ: {', '.join(wrong)}; seen between steps {since} and "
            f"{self._checked_until}. The shallow part does something halfway cannot see (it may mix samples of the "
            "batch)"
        )
        if self._reuse == "replay":
            raise ReplayError(f'{found}; use ForwardBlocker(..., reuse="recompute")')
        self._distrusted = "a spot check found that replayed and computed values differ"
        self._fallbacks.known(self._distrusted)
        self.drop()
        warnings.warn(
            f"{found}. From now on the shallow layers are computed twice instead; steps since then may have had wrong "
            'gradients. Use ForwardBlocker(..., reuse="recompute") from the start',
            stacklevel=2,
        )


def _lost_by(engine: Engine) -> Callable[[Pending], None]:
    """`engine._lost`, without keeping the engine alive."""
    owner = weakref.ref(engine)

    def lost(pending: Pending) -> None:
        alive = owner()
        if alive is not None:
            alive._lost(pending)

    return lost
