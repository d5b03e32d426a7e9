"""Times of steps, with layers that take one invented second per sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn

from halfway.advice.learner import Setup
from halfway.advice.timing import relative_times

from .invented import CPU, Ticking, pairs, takes_time


def timed(
    model: nn.Module, at: str | None, ratio: float = 0.5, seconds: float = 1e9
) -> tuple[dict[str, float], str, Any]:
    Ticking.time, Ticking.tick = 0.0, 1e-6
    reports: list[float] = []
    setup = Setup(model, None, F.cross_entropy, CPU)
    return *relative_times(setup, pairs(3, size=16), ratio, at, seconds, Ticking(), reports.append), reports


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_a_random_step_takes_the_time_of_its_retained_samples(ratio: float) -> None:
    model = deep()
    model[2].register_forward_pre_hook(takes_time)  # type: ignore[operator]
    times, problem, _ = timed(model, "0", ratio)
    assert times["random"] == pytest.approx(1 - ratio, rel=1e-3)
    assert times["cut"] == pytest.approx(1 - ratio, rel=1e-3)  # the slow layer lies behind the cut
    assert problem == ""


def test_a_step_with_a_cut_also_takes_the_time_of_the_layers_before_it() -> None:
    model = deep()
    model[0].register_forward_pre_hook(takes_time)  # type: ignore[operator]
    times, _, _ = timed(model, "1")
    assert times["cut"] >= 1


def test_without_a_cut_and_with_one_that_cannot_be_used() -> None:
    model = deep()
    model[4].register_forward_pre_hook(takes_time)  # type: ignore[operator]
    times, problem, reports = timed(model, None)
    assert set(times) == {"random"}
    assert problem == ""
    assert reports[-1] == 1.0
    unused = nn.Linear(4, 4)
    model.add_module("5", nn.Identity())
    model[5].unused = unused  # type: ignore[index]
    times, problem, _ = timed(model, "5.unused")
    assert set(times) == {"random"}
    assert "5.unused" in problem
    assert times["random"] == pytest.approx(0.5, rel=1e-3)


def test_rounds_stop_when_the_time_is_up_but_there_are_three() -> None:
    model = deep()
    model[0].register_forward_pre_hook(takes_time)  # type: ignore[operator]
    _, _, reports = timed(model, None, seconds=1e-9)
    assert len(reports) == 3 + 1
    _, _, reports = timed(model, None)
    assert len(reports) == 15 + 1
