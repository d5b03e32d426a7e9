"""Wall time of a pruned step relative to a full one, side by side on the same batches."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Sequence

from ..batches.batch import length
from ..blocker.blocker import ForwardBlocker
from .learner import Batch, Setup
from .trial import Clock, Report

FULL, RANDOM, CUT = "full", "random", "cut"
_WARM_UP = 3
_ROUNDS = (3, 15)


def relative_times(
    setup: Setup, batches: Sequence[Batch], ratio: float, at: str | None, seconds: float, clock: Clock, report: Report
) -> tuple[dict[str, float], str]:
    """Medians over rounds that take every step once, in turns; and why the step with a cut is missing, or "".

    Args:
        at: the cut of the step that looks at features (the paper's selector); None: no such step.
        seconds: roughly; there are 3 to 15 rounds.
    """
    problem = ""
    # Full ones only: a short last batch takes another time, and half of it may be too few for BatchNorm.
    sizes = [length(x) for x, _ in batches]
    batches = [batch for batch, size in zip(batches, sizes, strict=True) if size == max(sizes)]
    warm_up = list(itertools.islice(itertools.cycle(batches), _WARM_UP))
    blocked: dict[str, tuple[str | None, str] | None] = {FULL: None, RANDOM: (None, "random")}
    if at is not None:
        blocked[CUT] = (at, "density")
    steps = {}
    with contextlib.ExitStack() as stack:
        for name, blocking in blocked.items():
            try:
                step = _step(setup, ratio, blocking, stack)
                for batch in warm_up:
                    step(batch)
            except (RuntimeError, TypeError, ValueError) as error:
                if name != CUT:
                    raise
                problem = str(error).splitlines()[0]
            else:
                steps[name] = step
        taken = _rounds(steps, batches, seconds, clock, report)
    return {
        name: statistics.median(mine / full for mine, full in zip(taken[name], taken[FULL], strict=True))
        for name in steps
        if name != FULL
    }, problem


def _step(
    setup: Setup, ratio: float, blocking: tuple[str | None, str] | None, stack: contextlib.ExitStack
) -> Callable[[Batch], object]:
    """A training step on a copy of its own, whose weights stay as they are: the learning rate is 0."""
    learner, blocker = setup.learner(), None
    if blocking is not None:
        at, selector = blocking
        blocker = stack.enter_context(ForwardBlocker(learner.model, at, ratio, selector=selector))
    return lambda batch: learner.step(batch, 0.0, blocker)


def _rounds(
    steps: dict[str, Callable[[Batch], object]], batches: Sequence[Batch], seconds: float, clock: Clock, report: Report
) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in steps}
    order, (fewest, most) = list(steps), _ROUNDS
    begin = clock.then()
    for i in range(most):
        if i >= fewest and clock.now() - begin > seconds:
            break
        for name in order[i % len(order) :] + order[: i % len(order)]:
            start = clock.then()
            steps[name](batches[i % len(batches)])
            taken[name].append(clock.then() - start)
        report((i + 1) / most)
    report(1.0)
    return taken
