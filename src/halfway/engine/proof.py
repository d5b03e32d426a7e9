"""Proving that a probe may be replayed, once for every kind of step, and remembering what was proven.

A rehearsal runs the shallow part on some of the samples and finds each operation's rows on the tape; a swap overwrites
these samples with others, and the rest must not change by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..batches.inputs import Call, Inputs
from .axis import Logged
from .plan import Plan, disagreement, tolerance
from .probe import Probe, Prober, Stop, modules_seen
from .rehearsal import Rehearsal, Swap
from .replay import Replayer
from .sandbox import NoGraph, sandbox
from .tape import Diverged

# Differences beyond this many tolerances are errors, not rounding.
ERROR = 4.0
# How many kinds of steps are remembered, and how many rehearsals are normal before it looks hopeless.
_PLANS = 64
_MANY_REHEARSALS = 16
# Draws of rehearsed rows until they are not symmetric.
_DRAWS = 16

_UNDECIDED = "a random draw in the shallow part did not show yet which sample it belongs to"


class Prover:
    """Makes plans of replays.

    Attributes:
        last: the plan of the last pruned step.
    """

    def __init__(self, prober: Prober) -> None:
        self._prober = prober
        self._cut = prober.cut
        self._plans: dict[Any, list[Plan]] = {}
        self._rehearsals = 0
        self.last: Plan | None = None

    def plan(self, probe: Probe, call: Call, retained: int) -> Plan:
        """The plan for steps like this one: a known one, or a new one. May run the model; leaves no trace."""
        self.last = self._plan(probe, call, retained)
        return self.last

    def _plan(self, probe: Probe, call: Call, retained: int) -> Plan:
        if probe.tape.refusal:
            return Plan(refusal=probe.tape.refusal)
        tensors = call.inputs.tensors()
        described = tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
        key = (call.size, retained, described, self._prober.autocast.expected(tensors[0].device))
        known = self._plans.setdefault(key, [])
        for plan in known:
            if plan.program == probe.tape.program:
                return plan
        if self._rehearsals > _MANY_REHEARSALS and self._rehearsals > self._prober.probes / 4:
            return Plan(refusal="the shallow part takes another path, or another input shape, in most steps")
        plan = self._prove(probe, call, retained)
        if plan.undecided and not plan.refusal:
            return Plan(plan.program, ops=plan.ops, refusal=_UNDECIDED)
        if sum(map(len, self._plans.values())) >= _PLANS:
            self._plans.clear()
        self._plans.setdefault(key, []).append(plan)
        return plan

    def _prove(self, probe: Probe, call: Call, retained: int) -> Plan:
        """Find out whose recordings are whose, and that samples do not see each other."""
        self._rehearsals += 1
        drew_on_host = probe.host_random.moved()
        device, size = probe.features.device, call.size
        rows = rehearsed_rows(size, retained).to(device)
        others = torch.ones(size, dtype=torch.bool, device=device).index_fill(0, rows, False).nonzero().flatten()
        swapped = torch.arange(size, device=device)
        swapped[rows] = others.repeat(-(-retained // len(others)))[:retained]
        plan = Plan(program=[Logged(*logged) for logged in probe.tape.program])
        try:
            self._rehearse(probe, plan, call, rows)
            mixing = self._swap(probe, plan, call, swapped, others)
            if mixing:
                if any(len(places) > 1 for op in plan.ops if op.kind == "random" for places in op.options):
                    raise Diverged("the shallow part mixes samples, or random draws belong to others than they seem to")
                plan = Plan(program=plan.program, forced=mixing)
                self._rehearse(probe, plan, call, rows)
            share, why = plan.mixed()
            if share == 1:
                raise Diverged(f"all of the shallow part depends on other samples of the batch: it follows {why}")
        except Diverged as difference:
            plan.refusal = difference.reason
            if drew_on_host:
                plan.refusal += " (it draws with Python's or NumPy's generator, which may be once for each sample)"
        return plan

    def _rehearse(self, probe: Probe, plan: Plan, call: Call, rows: Tensor) -> None:
        """Run the shallow part on some of the samples and compare every operation with the tape."""
        part = call.part(rows).inputs
        entered = [""]
        rehearsal = Rehearsal(part.tensors(), probe.tape, plan, rows, lambda: entered[-1])

        def enter(module: nn.Module, args: Any) -> None:
            entered.append(self._prober.footprint.name(module) or entered[-1])

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            entered.pop()

        def at_cut(output: Any) -> None:
            rehearsal.finish()
            plan.mixed_features = rehearsal.mixed(self._cut.part_of(output))
            rehearsal.leave()
            with _disable_current_modes():
                off = features_off(self._cut.features([output], len(rows)), probe, rows)
            if off > ERROR and not plan.mixed_features:
                raise Diverged(f"the features of {self._cut.name!r} depend on the other samples of the batch")

        try:
            with modules_seen(enter, leave):
                self._pass(probe, rehearsal, part, at_cut)
        except Diverged as difference:
            if difference.__cause__ is not None:
                self._prober.run_plainly(part)  # raises the same, if it was the model's own failure
            raise

    def _swap(self, probe: Probe, plan: Plan, call: Call, swapped: Tensor, others: Tensor) -> set[int]:
        """Run the shallow part on all samples, some overwritten with others, which must not change by that; returns
        the operations in which they do."""

        def run(rows: Tensor, expected: dict[int, list[list[Tensor]]] | None) -> Swap:
            inputs = call.part(rows).inputs
            swap = Swap(inputs.tensors(), probe.tape, plan, rows, others, expected)
            self._pass(probe, swap, inputs, lambda output: swap.leave())
            return swap

        same = torch.arange(len(swapped), device=swapped.device)
        sums = run(same, None).sums
        changed = run(swapped, sums).changed()
        # Not the fault of the samples if it does not give the same for the same.
        return changed - run(same, sums).changed() if changed else changed

    def _pass(self, probe: Probe, passing: Replayer, inputs: Inputs, at_cut: Callable[[Any], None]) -> None:
        """Run the shallow part under `passing`, to the cut and as the probe did."""
        failure: list[Diverged] = []

        def stop(module: nn.Module, args: Any, output: Any) -> None:
            try:
                at_cut(output)
            except Diverged as difference:
                failure.append(difference)  # the model may swallow it
            raise Stop

        prober, device = self._prober, inputs.tensors()[0].device
        with self._cut.hooked(stop), sandbox(prober.footprint, passing, device, audited=True):
            probe.host_random.restore()
            with prober.passing(device, NoGraph()), passing.entered():
                try:
                    prober.run(inputs)
                except Exception as error:
                    raise Diverged(failed(error)) from error
        if failure:
            raise failure[0]
        passing.check()


def rehearsed_rows(size: int, retained: int) -> Tensor:
    """(S,) sorted rows of N, always the same ones. Scattered, or an operation that rolls the batch would show in one
    row only; not symmetric, or one that flips it would not show at all."""
    generator = torch.Generator("cpu").manual_seed(0)
    for _ in range(_DRAWS):
        rows = torch.randperm(size, generator=generator, device="cpu")[:retained].sort().values
        if not torch.equal(rows, (size - 1 - rows).flip(0)):
            break
    return rows


def features_off(found: Tensor, probe: Probe, rows: Tensor) -> Tensor:
    """How many tolerances the features of some samples are off what the probe saw."""
    expected = probe.features.index_select(0, rows).flatten(1)
    return disagreement(expected, found.flatten(1)) / tolerance(found)


def failed(error: Exception) -> str:
    """The reason for computing. If it is the model's own failure, its call on the retained samples raises it again."""
    return f"the shallow part fails on other samples than the whole batch ({type(error).__name__}: {error})"
