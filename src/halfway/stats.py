"""What blocking has done so far."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

# Of `Stats`: what not every blocker has, or what is no number.
_NOT_NUMBERS = ("recompute_reasons", "diagnostics", "explanation", "lag")


@dataclass
class Counters:
    """Counts on the host; nothing here waits for a device.

    steps: training batches the blocker was called on.
    pruned_steps: those in which samples were pruned.
    seen, retained: samples.
    replayed_steps: pruned steps that reused the shallow activations of the probe.
    recomputed: pruned steps that computed them again, counted by reason.
    operations_replayed, operations_computed: expensive operations of the shallow part in replayed steps.
    spent: training cost, in units of one sample's full training step (see `costs`).
    """

    steps: int = 0
    pruned_steps: int = 0
    seen: int = 0
    retained: int = 0
    replayed_steps: int = 0
    recomputed: Counter[str] = field(default_factory=Counter)
    operations_replayed: int = 0
    operations_computed: int = 0
    spent: float = 0.0

    def __post_init__(self) -> None:
        self._shallow_share: float | None = None
        # Samples whose shallow forward is not counted yet, one by one: a resumed run must add up to the same bits.
        self._unpriced: list[float] = []

    def spend_shallow(self, samples: float) -> None:
        """The shallow forward of so many samples, beside the training step of the retained ones."""
        self._unpriced.append(samples)
        if self._shallow_share is not None:
            self.price(self._shallow_share)

    def price(self, shallow_share: float) -> None:
        """It is known how a shallow forward compares with a whole step: count those that were waiting for it."""
        self._shallow_share = shallow_share
        for samples in self._unpriced:
            self.spent += samples * shallow_share
        self._unpriced.clear()

    def state_dict(self) -> dict[str, Any]:
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "recomputed": json.dumps(self.recomputed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        expected = {f.name for f in fields(self)}
        if set(state) != expected:
            raise ValueError(f"the state's counters are {sorted(state)}, expected {sorted(expected)}")
        vars(self).update(state, recomputed=Counter(json.loads(state["recomputed"])))


@dataclass(frozen=True)
class Stats:
    """A snapshot of what blocking has done so far.

    effective_ratio: pruned / seen; below `prune_ratio` when the schedule leaves epochs out or counts are rounded.
    relative_flops: FLOPs spent relative to training on all samples, the probe included.
    recompute_reasons: why steps were recomputed instead of replayed, with their number.
    lag: how many batches old what a `PrunedBatchSampler` knew was, at most; 0 for a blocker.
    diagnostics: the selector's own figures about its choices (see its card); empty for most selectors and before the
        first choice. Loading a state starts them afresh. They are ignored when snapshots are compared.
    explanation: what the selector does at the moment, and why (`auto`); "" for most. Ignored, too.
    """

    steps: int
    pruned_steps: int
    samples_seen: int
    samples_retained: int
    effective_ratio: float
    relative_flops: float
    steps_replayed: int
    steps_recomputed: int
    operations_replayed: int
    operations_computed: int
    recompute_reasons: dict[str, int]
    lag: int = 0
    diagnostics: dict[str, float] = field(default_factory=dict, compare=False)
    explanation: str = field(default="", compare=False)

    @classmethod
    def of(cls, c: Counters, diagnostics: dict[str, float] | None = None, explanation: str = "", lag: int = 0) -> Stats:
        return cls(
            steps=c.steps,
            pruned_steps=c.pruned_steps,
            samples_seen=c.seen,
            samples_retained=c.retained,
            effective_ratio=1 - c.retained / c.seen if c.seen else 0.0,
            relative_flops=c.spent / c.seen if c.seen else 1.0,
            steps_replayed=c.replayed_steps,
            steps_recomputed=sum(c.recomputed.values()),
            operations_replayed=c.operations_replayed,
            operations_computed=c.operations_computed,
            recompute_reasons=dict(c.recomputed),
            lag=lag,
            diagnostics=dict(diagnostics or {}),
            explanation=explanation,
        )

    def as_dict(self) -> dict[str, float]:
        """A flat dict of the numbers that every blocker has, with stable names, for a logger."""
        return {k: v for k, v in vars(self).items() if k not in _NOT_NUMBERS}
