"""Short trainings: how long they are, what they see, what they report."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfway.advice import trial
from halfway.advice.learner import Setup
from halfway.advice.trial import Stream, Trial, fewer_images, fewer_passes, number_of_batches

from .invented import CPU, Ticking, net, pairs

rates: list[float] = []
seen: list[int] = []


class Noting(torch.optim.SGD):
    """Notes the learning rate of each step."""

    def step(self, closure: Any = None) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return super().step(closure)


class Reading(nn.Linear):
    """Notes which batch it sees: the first entry of the input is its number."""

    def forward(self, x: Tensor) -> Tensor:
        seen.append(int(x[0, 0]))
        return super().forward(x)


@pytest.fixture(autouse=True)
def _forget() -> None:
    rates.clear()
    seen.clear()
    Ticking.time, Ticking.tick = 0.0, 0.01


def numbered(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.full((4, 4), float(i)), torch.zeros(4, dtype=torch.long)) for i in range(count)]


def setup(model: nn.Module | None = None, rate: float = 0.1) -> Setup:
    made = net() if model is None else model
    return Setup(made, Noting(made.parameters(), lr=rate), F.cross_entropy, CPU)


def passes(loader: Any, epochs: float = 1000, seconds: float = 3.0, **more: Any) -> tuple[Trial, list[float]]:
    reports: list[float] = []
    clock = Ticking()
    trial = fewer_passes(setup(**more), Stream(loader, CPU, clock), epochs, seconds, clock, reports.append)
    return trial, reports


def images(loader: Any, epochs: float, seconds: float = 3.0, **more: Any) -> tuple[Trial, list[Any]]:
    clock = Ticking()
    return fewer_images(setup(**more), Stream(loader, CPU, clock), epochs, seconds, clock, lambda done: None)


def frozen(probabilities: list[float]) -> nn.Module:
    """A model that predicts the same for every input, and never learns."""
    model = nn.Linear(4, len(probabilities))
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor(probabilities).log())
    return model


@pytest.mark.parametrize("kind", ["passes", "images"])
def test_the_share_of_small_losses_and_the_mean_loss_in_closed_form(kind: str) -> None:
    """Of ten samples three are predicted with 0.95, a loss of 0.05; the others with 0.05 and a loss of 3."""
    y = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1, 1])
    loader, model = [(torch.randn(10, 4), y)] * 3, frozen([0.95, 0.05])
    trial = (
        passes(loader, model=model, rate=0.0)[0] if kind == "passes" else images(loader, 5, model=model, rate=0.0)[0]
    )
    assert trial.small == pytest.approx(0.3)
    assert trial.loss == pytest.approx(-0.3 * math.log(0.95) - 0.7 * math.log(0.05))


@pytest.mark.parametrize(("probability", "share"), [(0.91, 0.5), (0.90, 0.0)])
def test_a_loss_is_small_below_a_tenth(probability: float, share: float) -> None:
    """-ln 0.91 is 0.094, and -ln 0.90 is 0.105."""
    loader, model = [(torch.randn(4, 4), torch.tensor([0, 1, 0, 1]))] * 2, frozen([probability, 1 - probability])
    assert passes(loader, model=model, rate=0.0)[0].small == pytest.approx(share)


def test_samples_without_a_label_are_left_out() -> None:
    model = frozen([0.95, 0.05])
    batches = [(torch.zeros(4, 4), torch.tensor([0, 0, 1, -100])), (torch.zeros(2, 4), torch.tensor([-100, -100]))]
    trial, _ = passes(batches, model=model, rate=0.0)
    assert trial.small == pytest.approx(2 / 3)
    assert trial.loss == pytest.approx(-(2 * math.log(0.95) + math.log(0.05)) / 3, rel=1e-5)


class Stub:
    """A learner whose losses are given."""

    def __init__(self, losses: list[list[float]]) -> None:
        self._losses = iter(losses)

    def step(self, batch: Any, factor: float) -> Tensor:
        return torch.tensor(next(self._losses))


@pytest.mark.parametrize(
    ("last", "error", "words"),
    [
        ([math.inf, 0.1, 0.1], FloatingPointError, "has diverged"),
        ([math.nan, math.nan, math.nan], ValueError, "no sample of the last batches has a label"),
    ],
)
def test_diverged_is_not_unlabelled(last: list[float], error: type[Exception], words: str) -> None:
    steps = Stub([[0.1, 0.1, 0.1]] * 9 + [last])
    with pytest.raises(error, match=words):
        trial._train(steps, itertools.repeat(None), 10, 1e9, Ticking(), lambda done: None)  # type: ignore[arg-type]


def test_only_the_last_tenth_of_the_steps_counts() -> None:
    def learnable(count: int) -> Iterator[tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(1)
        for _ in range(count):
            y = torch.randint(2, (16,), generator=draw)
            yield F.one_hot(y, 4).float() * 4, y

    trial, _ = passes(list(learnable(20)), seconds=8.0, model=nn.Linear(4, 2), rate=0.5)
    assert trial.steps > 100
    assert trial.small == 1.0  # at first no loss was
    assert trial.loss < 0.1


def test_the_learning_rate_ends_at_zero_when_the_time_is_up_and_progress_at_one() -> None:
    trial, reports = passes(pairs(), seconds=6.0)
    taken = rates[-trial.steps :]
    assert max(taken) == pytest.approx(0.1, rel=0.01)
    assert 0 <= taken[-1] < 0.001
    assert reports[-1] == 1.0
    assert reports == sorted(reports)
    assert Ticking.time == pytest.approx(6.0, rel=0.1)


def test_steps_that_become_slower_than_the_first_ones_still_end_in_time_with_a_rate_of_zero() -> None:
    def slower() -> Iterator[tuple[Tensor, Tensor]]:
        for i, batch in enumerate(pairs(2000)):
            Ticking.tick = 0.01 if i < 40 else 0.05
            yield batch

    class Loader:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return slower()

    trial, _ = passes(Loader(), seconds=10.0)
    assert Ticking.time < 11
    assert rates[-1] < 0.01
    assert trial.passes is None  # the loader has no length, and did not end


def test_a_training_that_fits_into_the_time_is_as_long_as_planned() -> None:
    trial, _ = passes(pairs(5), epochs=7, seconds=100.0)
    assert (trial.steps, trial.passes) == (35, 7)
    trial, cached = images(pairs(5), epochs=7, seconds=100.0)
    assert (trial.steps, trial.passes, len(cached)) == (35, 7, 5)


def test_fewer_images_are_passed_over_as_often_as_planned() -> None:
    trial, cached = images(numbered(50), epochs=20, model=Reading(4, 2), seconds=3.0)
    assert trial.passes == 20
    assert 1 < len(cached) < 50
    assert trial.steps == 20 * len(cached)
    assert seen[-trial.steps :] == 20 * [int(x[0, 0]) for x, _ in cached]
    assert trial.waiting == 0


def test_with_more_passes_than_steps_one_batch_is_passed_over_as_often_as_there_is_time_for() -> None:
    trial, cached = images(pairs(), epochs=10_000)
    assert len(cached) == 1
    assert trial.passes == trial.steps < 10_000


@pytest.mark.parametrize(
    ("arguments", "count"),
    [((100, 10, 50, 8), 10), ((100, 10, 4, 8), 4), ((100, 1000, 50, 8), 1), ((100, 10, None, 2**28), 4)],
)
def test_the_number_of_cached_batches(arguments: Any, count: int) -> None:
    assert number_of_batches(*arguments) == count


def test_waiting_for_data_is_told_apart_from_computing() -> None:
    class Slow(list):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                Ticking.time += 0.05
                yield batch

    # Of each step 0.06 s are waiting, and 0.01 s pass until the clock is read again.
    trial, _ = passes(Slow(pairs(40)), seconds=8.0)
    assert trial.seconds_per_step == pytest.approx(0.08, rel=0.1)
    assert trial.waiting == pytest.approx(0.06 / 0.08, rel=0.1)
    assert passes(pairs(40), seconds=8.0)[0].waiting < 0.4


def test_a_stream_begins_anew_and_counts_its_batches() -> None:
    class NoLength:
        def __iter__(self) -> Iterator[Any]:
            return iter(numbered(3))

    stream = Stream(NoLength(), CPU, Ticking())
    assert [int(next(stream)[0][0, 0]) for _ in range(3)] == [0, 1, 2]
    assert stream.per_epoch is None
    assert int(next(stream)[0][0, 0]) == 0
    assert stream.per_epoch == 3


def test_errors_name_the_fix() -> None:
    with pytest.raises(ValueError, match=r"leaves 1\d steps for a training.*allow for at least \d+ s"):
        passes(pairs(), seconds=0.65)
    with pytest.raises(ValueError, match="the loader yields no batch"):
        passes([])

    class Once:
        """Like a stateful IterableDataset."""

        batches = iter(pairs(30))

        def __iter__(self) -> Iterator[Any]:
            return self.batches

    with pytest.raises(ValueError, match="or can be read only once"):
        passes(Once())
    with pytest.raises(FloatingPointError, match="lower learning rate, or set clip_norm"):
        passes([(1e30 * x, y) for x, y in pairs()], rate=1e30, model=nn.Linear(4, 3))
