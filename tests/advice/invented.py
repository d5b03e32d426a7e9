"""Invented clocks, trainings and evidence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from halfway.advice.evidence import Evidence, Finding, Interval, Rung
from halfway.advice.trial import Clock

CPU = torch.device("cpu")


class Ticking(Clock):
    """Time that passes only where it is told to, and a little whenever the clock is read."""

    time = 0.0
    tick = 0.01

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device)

    def now(self) -> float:
        Ticking.time += Ticking.tick
        return Ticking.time

    def then(self) -> float:
        return self.now()


def takes_time(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    """A hook: a layer takes one second per sample. A plain function, so that copies of a model share it."""
    Ticking.time += len(args[0])


def takes_a_second(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    """A hook: a layer takes as long for few samples as for many."""
    Ticking.time += 1


def net(classes: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, classes)
    )


def pairs(batches: int = 6, size: int = 8, classes: int = 3) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [
        (torch.randn(size, 4, generator=draw), torch.randint(classes, (size,), generator=draw)) for _ in range(batches)
    ]


# --------------------------------------------------------------------- evidence


def finding(role: str, gain: tuple[float, float, float] | None, **more: Any) -> Finding:
    given: dict[str, Any] = {
        "arm": role,
        "role": role,
        "selector": "" if role == "shorter" else "random",
        "settings": {},
        "cut": "",
        "prune_ratio": 0.5,
        "cost": 0.5,
        "to_full": Interval(-1.5, -2.0, -1.0),
        "gain": None if gain is None else Interval(*gain),
        "better": "random",
        "n": 5,
        "stage": "confirm",
        "p": None if gain is None else 0.001 if gain[1] > 0 or gain[2] < 0 else 0.4,
    }
    return Finding(**{**given, **more})


def method(selector: str, gain: tuple[float, float, float], **more: Any) -> Finding:
    return finding("method", gain, arm=selector, selector=selector, **more)


def controls(random_over_shorter: float) -> tuple[Finding, ...]:
    g = random_over_shorter
    return (
        finding("random", (g, g - 0.2, g + 0.2), better="shorter"),
        finding("shorter", (-g, -g - 0.2, -g + 0.2)),
    )


def rung(name: str, small: float, *findings: Finding, ladder: str = "C", tried: int | None = None) -> Rung:
    tried = len({each.same for each in findings if each.role == "method"}) if tried is None else tried
    return Rung(name, ladder, 16, {"full": small, "random": small / 2}, tried, findings)


def evidence(*rungs: Rung) -> Evidence:
    return Evidence(rungs, "invented")
