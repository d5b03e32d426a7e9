"""The runs of a comparison: every method at every ratio, setting and seed, and nothing twice.

A method that ignores a setting is not run again for its other values: full data give the same run at every ratio, and
random pruning at every cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..recipes.methods import FULL, IMPLEMENTATIONS, METHODS, resolve
from ..recipes.predicted_cost import Equal, fitted, predicted_cost, random_ratio
from ..recipes.schema import Recipe

# Settings that define the comparison itself have their own options.
_OF_PLAN = {"method": "--methods", "prune_ratio": "--ratios", "seed": "--seeds"}


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed.

    ratio: None for full data.
    settings: what `--over` changed.
    """

    method: str
    ratio: float | None
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """The group's name in tables."""
        return ", ".join([self.method, *([] if self.ratio is None else [f"p = {self.ratio:g}"]), *self._changes()])

    @property
    def folder(self) -> str:
        """What the names of its run folders begin with."""
        parts = [self.method, *([] if self.ratio is None else [f"{self.ratio:g}"]), *self._changes()]
        return "-".join(part.replace("/", "_").replace(" ", "") for part in parts)

    def _changes(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.settings]

    @property
    def rival_full(self) -> Group:
        """Full data at the same settings, as far as these matter to it."""
        return group_of(FULL, None, dict(self.settings))

    def rival(self, method: str) -> Group:
        """Another method at the same ratio and settings, as far as these matter to it."""
        return group_of(method, self.ratio, dict(self.settings))


@dataclass(frozen=True)
class Trial:
    """One run of a comparison."""

    group: Group
    seed: int
    recipe: Recipe

    @property
    def folder(self) -> str:
        return f"{self.group.folder}-s{self.seed}"


def group_of(method: str, ratio: float | None, settings: dict[str, Any]) -> Group:
    """The group, without the settings that the method ignores."""
    method = resolve(method)
    kept = tuple((key, value) for key, value in sorted(settings.items()) if matters(key, method))
    return Group(method, None if method == FULL else ratio, kept)


def plan(
    recipe: Recipe,
    methods: Sequence[str],
    ratios: Sequence[float],
    seeds: Sequence[int],
    over: Mapping[str, Sequence[Any]],
    equal: Equal | None = None,
    random_at_equal_cost: bool = False,
    fewer_epochs: bool = False,
) -> list[Trial]:
    """All trials, each once. All methods of a seed come together, so that the first ones done can be compared.

    Args:
        equal: see `predicted_cost.fitted`.
        random_at_equal_cost: also random pruning at the ratios at which it costs what the other methods do.
        fewer_epochs: also full data for as many epochs as cost what the other methods do.
    """
    for key, option in _OF_PLAN.items():
        if key in over:
            raise ValueError(f"{key} is not swept by --over, but by {option}")
    trials: dict[tuple[Group, int], Trial] = {}
    changes = [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]
    for settings, ratio, seed, method in itertools.product(changes, ratios, seeds, methods):
        trial = _trial(recipe, method, ratio, settings, seed)
        fitting = fitted(trial.recipe, equal)
        if fitting:
            trial = _trial(recipe, method, fitting.pop("prune_ratio"), {**settings, **fitting}, seed)
        trials.setdefault((trial.group, seed), trial)
        if random_at_equal_cost and trial.recipe.prunes:
            rival = _trial(recipe, "random", random_ratio(trial.recipe), settings, seed)
            trials.setdefault((rival.group, seed), rival)
        if fewer_epochs and trial.recipe.prunes:
            rival = _shorter(recipe, predicted_cost(trial.recipe).run, settings, seed)
            trials.setdefault((rival.group, seed), rival)
    return list(trials.values())


def _shorter(recipe: Recipe, share: float, settings: dict[str, Any], seed: int) -> Trial:
    """Full data for a share of the epochs, with a learning-rate schedule of that length."""
    whole = _trial(recipe, FULL, 0.0, settings, seed)
    length = max(1, round(share * whole.recipe.length))
    group = group_of(FULL, None, {**settings, "length": length})
    return Trial(group, seed, whole.recipe.of_length(length))


def _trial(recipe: Recipe, method: str, ratio: float, settings: dict[str, Any], seed: int) -> Trial:
    group = group_of(method, ratio, settings)
    chosen: dict[str, Any] = {"method": group.method, "seed": seed, **dict(group.settings)}
    if group.ratio is not None:
        chosen["prune_ratio"] = group.ratio
    return Trial(group, seed, recipe.with_settings(chosen))


def matters(key: str, method: str) -> bool:
    """Whether a setting affects a method."""
    section = key.split(".")[0]
    if method == FULL:
        return section not in ("window", "cut", *IMPLEMENTATIONS)
    known = METHODS[method]
    if section == "cut":
        return known.needs == "features"
    return section == known.implementation or section not in IMPLEMENTATIONS
