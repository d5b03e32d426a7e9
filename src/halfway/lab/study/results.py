"""All results of a study, with the words that its primary family allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..comparison.verdict import Verdict, in_family, verdict
from . import plan
from .arms import Arm, arms
from .gains import Gain, gains, key
from .holm import holm, p_value

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Study:
    """All results of a study.

    stages: as in its file.
    arms, gains: by stage.
    adjusted: the p values of the primary family after Holm's correction, by stage, recipe and arm.
    family: how many comparisons the family has, as planned.
    """

    stages: Mapping[str, Mapping[str, Any]]
    arms: dict[str, list[Arm]]
    gains: dict[str, list[Gain]]
    adjusted: dict[Key, float]
    family: int

    def is_primary(self, arm: Arm) -> bool:
        return arm.name in self.stages[arm.stage].get("primary", [])

    def word(self, each: Gain) -> Verdict | None:
        """What may be said about a gain; None if there is none."""
        gain = each.score.gain
        if gain is None:
            return None
        return in_family(gain, self.adjusted.get(key(each.arm), 1.0)) if self.is_primary(each.arm) else verdict(gain)


def collect(stages: Mapping[str, Mapping[str, Any]], entries: Sequence[Mapping[str, Any]], root: str = "data") -> Study:
    """The results of a study. entries: of its ledger."""
    by_stage = {name: arms(plan.runs(name, stage, root), entries) for name, stage in stages.items()}
    found = {name: gains(members) for name, members in by_stage.items()}
    family = sum(len(stage.get("primary", [])) * len(stage["recipes"]) for stage in stages.values())
    values: dict[Key, float] = {}
    for name, members in found.items():
        for each in members:
            p = None if each.score.gain is None else p_value(each.score.gain)
            if p is not None and each.arm.name in stages[name].get("primary", []):
                values[key(each.arm)] = p
    return Study(stages, by_stage, found, holm(values, family), family)
