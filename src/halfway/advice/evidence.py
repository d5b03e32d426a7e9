"""What is known about pruning at a reduced scale: a small extract of the map, in `evidence.json`.

`halfway study results/map/study.yaml --table --evidence FILE` writes it. A rung is a recipe of the map. Rungs of a
ladder differ in how often an image is seen, and so in the share of small losses at the end, by which they are found
again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

# The trials are a rule of thumb: on two of six rungs the end lay a few points beyond their bounds.
MARGIN = 0.05

Role = Literal["random", "shorter", "method"]
Stage = Literal["screen", "confirm"]


@dataclass(frozen=True)
class Interval:
    """A difference of scores in points, with its 95 % interval; None where there is none."""

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def below(self) -> bool:
        """Whether all of it lies below zero."""
        return self.high is not None and self.high < 0

    def __str__(self) -> str:
        """+0.31 [-0.10, +0.72]"""
        return f"{self.mean:+.2f}" if self.low is None else f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


@dataclass(frozen=True)
class Finding:
    """An arm of the map on a rung.

    arm: its name there.
    role: random: random pruning without window. shorter: full data for fewer steps. method: anything else.
    selector: the name of a selector or sampler; "" for `shorter`.
    settings: of the selector, as far as they are not its defaults.
    cut: the layer it looked at, in the map's network; "" if at none.
    cost: of the run in FLOPs, relative to full data.
    to_full: the score minus that of full data.
    gain: the score minus that of the better control at equal cost; of a control minus that of the other one.
    better: which control that is.
    n: seeds of the gain; of `to_full` where there is none.
    stage: screen: on validation images, where settings were chosen; confirm: on test images and other seeds.
    p: two-sided p value of the gain, not corrected; None without an interval.
    """

    arm: str
    role: Role
    selector: str
    settings: Mapping[str, Any]
    cut: str
    prune_ratio: float
    cost: float
    to_full: Interval | None
    gain: Interval | None
    better: str | None
    n: int
    stage: Stage
    p: float | None = None

    @property
    def same(self) -> tuple[str, ...]:
        """Equal for arms that differ in the ratio and the stage alone."""
        return self.role, self.selector, json.dumps(dict(self.settings), sort_keys=True, default=str), self.cut


@dataclass(frozen=True)
class Rung:
    """A recipe of the map.

    ladder: "" for recipes that do not count as rungs, because their data are special.
    passes: over the images; None if not known.
    small: the share of plain losses below 0.1 at the end, of full data and of random pruning.
    tried: how many methods were trained there, also those of a single seed, which make no finding.
    """

    name: str
    ladder: str
    passes: float | None
    small: Mapping[str, float]
    tried: int
    findings: tuple[Finding, ...] = ()

    def at(self, prune_ratio: float) -> list[Finding]:
        """One finding per arm: confirmed ones before others, then the one whose ratio is nearest, then the one with the
        most seeds."""
        chosen: dict[tuple[str, ...], Finding] = {}
        ordered = sorted(self.findings, key=lambda f: (f.stage != "confirm", abs(f.prune_ratio - prune_ratio), -f.n))
        for finding in ordered:
            chosen.setdefault(finding.same, finding)
        return list(chosen.values())


@dataclass(frozen=True)
class Evidence:
    """The map in small. about: where it comes from."""

    rungs: tuple[Rung, ...] = ()
    about: str = ""

    def near(self, low: float, high: float) -> list[Rung]:
        """The rungs of ladders with comparisons whose share of small losses at the end of full training lies within
        `MARGIN` of these bounds; if there is none, the nearest."""
        known = [rung for rung in self.rungs if rung.ladder and rung.findings and "full" in rung.small]

        def distance(rung: Rung) -> float:
            return max(low - rung.small["full"], rung.small["full"] - high)

        found = [rung for rung in known if distance(rung) <= MARGIN] or sorted(known, key=distance)[:1]
        return sorted(found, key=lambda rung: rung.small["full"])


def read() -> Evidence:
    """The evidence that comes with halfway."""
    return parsed(json.loads(resources.files(__package__).joinpath("evidence.json").read_text(encoding="utf-8")))


def parsed(content: Mapping[str, Any]) -> Evidence:
    """From plain values, as in `evidence.json`."""
    return Evidence(tuple(_rung(entry) for entry in content["rungs"]), content["about"])


def _rung(entry: Mapping[str, Any]) -> Rung:
    findings = tuple(
        Finding(**{**each, "to_full": _interval(each["to_full"]), "gain": _interval(each["gain"])})
        for each in entry["findings"]
    )
    return Rung(**{**entry, "findings": findings})


def _interval(values: Sequence[float | None] | None) -> Interval | None:
    if values is None or values[0] is None:
        return None
    return Interval(values[0], values[1], values[2])
