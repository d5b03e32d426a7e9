"""Warnings, once each, where a training goes on and nothing is pruned."""

from __future__ import annotations

import itertools
import warnings

from ..functional import retained_count
from ..schedule import Schedule
from ..stats import Counters


class Reminders:
    """What one blocker has to say about itself. Each sentence is said once."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._said: set[str] = set()
        self._began: tuple[int, int, int] | None = None

    def in_eval_mode(self, prune_ratio: float) -> None:
        """The blocker was called with grad enabled, and the model is in eval mode."""
        if prune_ratio > 0:
            self._say(
                "the model is in eval mode, so nothing is pruned. To train with frozen BatchNorm call model.train() "
                "and put only these layers in eval mode (`for m in model.modules(): if isinstance(m, nn.BatchNorm2d): "
                "m.eval()`); if this is an evaluation, run it under torch.no_grad()"
            )

    def epoch_begins(self, epoch: int | None, schedule: Schedule, prune_ratio: float) -> None:
        """`epoch` has ended, if it is one, and another begins."""
        now = self._counters
        began, self._began = self._began, (now.steps, now.seen, now.pruned_steps)
        if began is None or epoch is None or prune_ratio == 0:
            return
        steps, seen, pruned_steps = began
        active = schedule.active(epoch) if schedule.unit == "epoch" else schedule.meets(steps, now.steps)
        if active and now.seen > seen and now.pruned_steps == pruned_steps:
            enough = next(n for n in itertools.count(1) if retained_count(n, prune_ratio) < n)
            self._say(
                f"nothing was pruned in epoch {epoch}, though the schedule says so: a batch of N samples loses "
                f"round({prune_ratio:g} N) of them, which is none for fewer than {enough}. Use larger batches or a "
                "larger prune_ratio"
            )

    def forget(self) -> None:
        """Another state was loaded: what came before is no epoch of this training."""
        self._began = None

    def _say(self, words: str) -> None:
        # By its beginning: an epoch that is named does not make it another sentence.
        if words[:20] not in self._said:
            self._said.add(words[:20])
            warnings.warn(words, stacklevel=4)
