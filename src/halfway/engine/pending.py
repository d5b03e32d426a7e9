"""A probe that waits for its model call, and how to recognise that call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..batches.inputs import Call, Forward, Inputs
from .autocast import AutocastState
from .footprint import Footprint
from .plan import Plan
from .probe import Probe, Prober

AUTOCAST = "autocast is not what it was in the probe"
OTHER_ARGUMENTS = "the model was called with other arguments than the blocker saw"
OTHER_TENSORS = (
    "the model was not called with the tensors the blocker returned (move augmentation, mixup, .to(device) and "
    "normalisation before the blocker)"
)


class Pending:
    """One probe, to be replayed for some of its samples.

    Args:
        probe: of all samples.
        plan: how to replay it.
        part: the call on the retained samples, by which it will be recognised.
        indices: of these samples.
        prober: whose footprint and autocast must still be the same.
        dropped: called when a tensor that was handed out dies: then the call cannot come any more.
        spot: the operation to compute and compare, if any.
        audited: whether the features are compared.
    """

    def __init__(
        self,
        probe: Probe,
        plan: Plan,
        part: Call,
        indices: Tensor,
        prober: Prober,
        dropped: Callable[[Pending], None],
        spot: int | None,
        audited: bool,
    ) -> None:
        self.probe, self.plan, self.indices = probe, plan, indices
        self.spot, self.audited = spot, audited
        self.more_arguments = part.inputs.more
        self._forward: Forward = part.forward
        self._footprint: Footprint = prober.footprint
        arguments = part.arguments()
        itself = weakref.ref(self)

        def died(_: Any) -> None:
            alive = itself()
            if alive is not None:
                dropped(alive)

        self._arguments = {
            name: [weakref.ref(a, died) if isinstance(a, Tensor) else a for a in values]
            for name, values in arguments.items()
        }
        self._versions = [a._version for values in arguments.values() for a in values if isinstance(a, Tensor)]
        self._fingerprint = prober.footprint.fingerprint()
        self._autocast = prober.autocast.expected(part.inputs.tensors()[0].device)

    def difference(self, args: Any, kwargs: Any) -> str:
        """Why a call of the model is not the one that was prepared; "" if it is."""
        arguments = self._forward.bind(args, kwargs)
        if arguments is None or (not self.more_arguments and set(arguments) != set(self._arguments)):
            return OTHER_ARGUMENTS
        versions = []
        for name, values in self._arguments.items():
            found = arguments.get(name, ())
            if len(found) != len(values):
                return OTHER_ARGUMENTS
            for given, value in zip(found, values, strict=True):
                handed_out = value() if isinstance(value, weakref.ref) else value
                if given is not handed_out and (isinstance(given, Tensor) or isinstance(handed_out, Tensor)):
                    return OTHER_TENSORS
                if isinstance(given, Tensor):
                    versions.append(given._version)
                elif not _equal(given, handed_out):
                    return OTHER_ARGUMENTS
        if versions != self._versions:
            return "the retained samples were changed in place before the model was called"
        if self._footprint.fingerprint() != self._fingerprint:
            return "parameters or buffers changed between the blocker and the model's call"
        if AutocastState.now(Inputs(args, kwargs).tensors()[0].device) != self._autocast:
            return AUTOCAST
        return ""


def _equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:
        return False
