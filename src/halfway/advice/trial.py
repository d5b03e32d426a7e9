"""Two short trainings that bound where the planned one will end: how many of its losses will be small?

A few minutes cannot repeat a training, but can leave out one of the two things that make losses small. *Fewer passes*
sees all images, each of them less often than planned. *Fewer images* sees each as often as planned, but few of them,
always with the same augmentation. As a rule the first fits its images less well than the planned training will, and
the second better; on some rungs of the map it ended a few points beyond.

The learning rate of both rises, and falls to 0 within the time there is. No step waits for the device; the clock does,
where a measurement begins and ends.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from .classes import ClassesSeen
from .learner import Batch, Learner, Setup, bytes_of, factor_at, pair

# A plain loss below this is small: the sample is predicted with a probability above 0.9.
SMALL_LOSS = 0.1
_LAST = 0.1  # the share of the steps that is reported
_FEWEST_STEPS = 20
# How a step is timed: after a warm-up, until this share of the time is used, but not for ever.
_WARM_UP, _TIMED, _TIMING_SHARE = 2, (3, 20), 0.05
_CACHE_BYTES = 2**30

Report = Callable[[float], None]


@dataclass(frozen=True)
class Trial:
    """What a short training showed.

    steps: taken.
    passes: over its images; None if the loader has no length and did not end.
    loss, small: the mean plain loss, and the share of plain losses below 0.1, over the last tenth of the steps.
    seconds_per_step: with loading, as far as the step waits for it.
    waiting: the share of that time spent on waiting for data.
    """

    steps: int
    passes: float | None
    loss: float
    small: float
    seconds_per_step: float
    waiting: float


class Clock:
    """Seconds. `now` is the host's; `then` also waits until the device has done what it was given."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        return time.perf_counter()

    def then(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return self.now()


class Stream:
    """The batches of a loader without end, on the device. Counts how long they were waited for.

    per_epoch: batches in a pass over the loader; None as long as it is not known.
    has_ids: whether samples have positions in a data set: the loader has a length, and is no stream.
    classes: of the batches so far.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device, clock: Clock) -> None:
        self._loader, self._device, self._clock = loader, device, clock
        self._batches: Iterator[Any] = iter(())
        self._drawn = 0
        self._first = True
        self.waited = 0.0
        self.classes = ClassesSeen()
        try:
            self.per_epoch: int | None = len(loader)  # type: ignore[arg-type]
        except TypeError:
            self.per_epoch = None
        streams = isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset)
        self.has_ids = self.per_epoch is not None and not streams

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        asked = self._clock.now()
        batch = next(self._batches, None)
        if batch is None:
            if not self._first:
                self.per_epoch = self._drawn
            self._batches, self._first, self._drawn = iter(self._loader), False, 0
            batch = next(self._batches, None)
            if batch is None:
                raise ValueError(
                    "the loader yields no batch; is it empty, smaller than a batch, or can be read only once?"
                )
        self._drawn += 1
        found = pair(batch, self._device)
        self.waited += self._clock.now() - asked
        self.classes.note(found[1])
        return found


def fewer_passes(setup: Setup, stream: Stream, epochs: float, seconds: float, clock: Clock, report: Report) -> Trial:
    """Train on the loader's batches as they come, for the seconds there are or until the planned end."""
    allowed, left = _affordable(setup, stream, seconds, clock)
    planned = math.inf if stream.per_epoch is None else epochs * stream.per_epoch
    trial = _train(setup.learner(), stream, int(min(allowed, max(1, planned))), left, clock, report, stream)
    passes = None if stream.per_epoch is None else trial.steps / stream.per_epoch
    return replace(trial, passes=passes)


def fewer_images(
    setup: Setup, stream: Stream, epochs: float, seconds: float, clock: Clock, report: Report
) -> tuple[Trial, list[Batch]]:
    """Pass over a handful of batches as often as planned; also returns these."""
    first = next(stream)
    allowed, left = _affordable(setup, itertools.repeat(first), seconds, clock)
    count = number_of_batches(allowed, epochs, stream.per_epoch, bytes_of(first))
    cached = [first, *itertools.islice(stream, count - 1)]
    steps = max(1, min(allowed, round(epochs * count)))
    trial = _train(setup.learner(), itertools.cycle(cached), steps, left, clock, report)
    return replace(trial, passes=trial.steps / count), cached


def number_of_batches(steps: int, epochs: float, per_epoch: int | None, size: int) -> int:
    """How many batches can be passed over `epochs` times in `steps`; no more than there are, or than memory holds."""
    most = min(int(steps / epochs), _CACHE_BYTES // max(1, size))
    return max(1, most if per_epoch is None else min(most, per_epoch))


def _affordable(setup: Setup, batches: Iterator[Batch], seconds: float, clock: Clock) -> tuple[int, float]:
    """How many steps the seconds allow for, and the seconds that are left. Times a copy that is thrown away."""
    learner = setup.learner()
    begin = clock.then()
    for batch in itertools.islice(batches, _WARM_UP):
        learner.step(batch, factor_at(0.0))
    start = now = clock.then()
    steps, (fewest, most) = 0, _TIMED
    while steps < fewest or (steps < most and now - begin < _TIMING_SHARE * seconds):
        learner.step(next(batches), factor_at(0.0))
        steps += 1
        now = clock.then()
    each, left = max((now - start) / steps, 1e-9), seconds - (now - begin)
    if left / each < _FEWEST_STEPS:
        # Both trainings need as much, and what the timing took.
        needed = 2 * (_FEWEST_STEPS * each + now - begin)
        raise ValueError(
            f"a step takes {each:.3g} s, which leaves {max(0, int(left / each))} steps for a training: too few to say "
            f"anything; allow for at least {math.ceil(1.2 * needed)} s, or try it on the machine of the training"
        )
    return int(left / each), left


def _train(
    learner: Learner,
    batches: Iterator[Batch],
    steps: int,
    seconds: float,
    clock: Clock,
    report: Report,
    stream: Stream | None = None,
) -> Trial:
    """Train for that many steps; for fewer if the time is up before, because later steps are slower than the first."""
    kept: list[torch.Tensor] = []
    waited = 0.0 if stream is None else stream.waited
    begin = clock.then()
    done = 0.0
    while done < 1:
        plain_B = learner.step(next(batches), factor_at(done))
        labelled = plain_B.isnan().logical_not().sum()
        kept.append(torch.stack([plain_B.nanmean(), (plain_B < SMALL_LOSS).sum() / labelled]))
        done = max(len(kept) / steps, (clock.now() - begin) / seconds)
        report(min(1.0, done))
    spent = clock.then() - begin
    loss, small = torch.stack(kept[-math.ceil(_LAST * len(kept)) :]).nanmean(0).tolist()
    if math.isnan(loss):
        raise ValueError(
            "no sample of the last batches has a label (all classes are negative, all pixels of masks 255), so there "
            "is no loss to look at: pass a loader of labelled samples"
        )
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the loss is {loss} at the end of a trial of {len(kept)} steps: the training has diverged. Give the "
            "optimizer a lower learning rate, or set clip_norm; or look for inputs that hold NaN"
        )
    waiting = 0.0 if stream is None else min(1.0, (stream.waited - waited) / max(spent, 1e-9))
    return Trial(len(kept), None, loss, small, spent / len(kept), waiting)
