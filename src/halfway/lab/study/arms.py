"""The results of a study by arm: what its file planned, with what the ledger holds of it.

Results are found by what a run computes, not by the names in the ledger: a run that two stages plan is trained once,
and counts in both. So a stage whose arms need controls lists them, and pays nothing for those that exist.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ..recipes.methods import FULL, IMPLEMENTATIONS, METHODS, SHORTER
from ..recipes.schema import Recipe
from .ledger import last_small_losses
from .plan import Run

# full: full data. random: without window, a point of its curve; again: the same with another draw. shorter: full data
# for fewer steps. method: anything else.
Role = Literal["full", "random", "again", "shorter", "method"]
_RANDOM = ("random", "random_even")
# What may differ between an arm and its controls. Anything else, such as the learning rate, has controls of its own.
_OWN = {"method", "prune_ratio", "seed", "selection_seed", "cut", "window", *IMPLEMENTATIONS}
_RUNG = re.compile(r"ladder-([a-z])(\d+)")  # ladder-cifar100 is none: it has that many classes


@dataclass(frozen=True)
class Arm:
    """All runs of an arm on a recipe.

    recipe: of one of its runs.
    role: what the arm is to the others.
    family: equal for arms whose runs differ in the method alone.
    seeds: as planned.
    entries: the lines of the ledger, by seed; of the runs that are there.
    """

    stage: str
    base: str
    name: str
    recipe: Recipe
    role: Role
    family: tuple[tuple[str, Any], ...]
    seeds: tuple[int, ...]
    entries: dict[int, dict[str, Any]]

    @property
    def missing(self) -> list[int]:
        """Seeds without a result."""
        return [seed for seed in self.seeds if seed not in self.entries]

    @cached_property
    def scores(self) -> dict[int, float]:
        return {seed: entry["score"] for seed, entry in self.entries.items()}

    @cached_property
    def losses(self) -> dict[int, float]:
        """Test losses with the sign turned, so that more is better."""
        return {seed: -loss for seed, e in self.entries.items() if (loss := e.get("test_loss")) is not None}

    @cached_property
    def cost(self) -> float:
        """Of a run relative to full data."""
        return statistics.fmean(entry["cost"] for entry in self.entries.values())

    @property
    def before_epoch(self) -> bool:
        """Whether it decides before the epoch, and so takes fewer steps."""
        return self.recipe.method in METHODS and METHODS[self.recipe.method].before_epoch

    @property
    def rung(self) -> tuple[str, int] | None:
        """The ladder and the number of passes: ("C", 16)."""
        found = _RUNG.fullmatch(self.base)
        return None if found is None else (found[1].upper(), int(found[2]))

    @property
    def small_losses(self) -> float | None:
        """The share of plain losses below 0.1 in the last round of the training, mean over seeds."""
        return _mean([last_small_losses(entry) for entry in self.entries.values()])

    def mean(self, key: str) -> float | None:
        """Of an entry of the ledger, over seeds."""
        return _mean([entry.get(key) for entry in self.entries.values()])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def arms(runs: Sequence[Run], entries: Sequence[Mapping[str, Any]]) -> list[Arm]:
    """The arms of a stage on all its recipes, in the order of the file. runs: of that stage, see `plan.runs`."""
    by_key = {entry["key"]: dict(entry) for entry in entries}
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.base, run.arm), []).append(run)
    made: list[Arm] = []
    taken = set()
    for (base, name), members in groups.items():
        recipe = members[0].recipe
        family = _family(recipe)
        role = _role(recipe)
        if role == "random":
            point = (base, family, recipe.prune_ratio)
            role = "again" if point in taken else "random"
            taken.add(point)
        found = {run.seed: by_key[run.key] for run in members if run.key in by_key}
        seeds = tuple(run.seed for run in members)
        made.append(Arm(members[0].stage, base, name, recipe, role, family, seeds, found))
    return made


def _role(recipe: Recipe) -> Role:
    if recipe.method == FULL:
        return "full"
    if recipe.method == SHORTER:
        return "shorter"
    start, stop = recipe.window
    everywhere = recipe.method == "random_even" or (not start and (stop is None or stop >= recipe.length))
    plain = recipe.method in _RANDOM and everywhere and isinstance(recipe.prune_ratio, int | float)
    return "random" if plain else "method"


def _family(recipe: Recipe) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((k, v) for k, v in recipe.identity().items() if k.split(".")[0] not in _OWN))
