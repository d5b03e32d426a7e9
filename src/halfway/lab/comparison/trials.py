"""The runs of a comparison: every method at every ratio, setting and seed, and nothing twice.

A method that ignores a setting is not run again for its other values: full data give the same run at every ratio, and
random pruning at every cut.

`--ratios` are pruning ratios in the recipe's window. Controls know no window: at each of these ratios they are trained
at the one where they cost what random pruning does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..recipes.methods import CONTROLS, FULL, IMPLEMENTATIONS, METHODS, SHORTER, WHOLE_BATCHES, resolve, without_window
from ..recipes.predicted_cost import Equal, control_ratio, fitted, predicted_cost, random_ratio
from ..recipes.schema import Recipe

# Settings that define the comparison itself have their own options.
_OF_PLAN = {"method": "--methods", "prune_ratio": "--ratios", "seed": "--seeds"}
# The controls that a method must beat, and how far apart in cost the points of their curves may be.
CURVES = ("random_even", SHORTER)
_FURTHEST = 1.25


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
        """Another method at the same ratio and settings, as far as these matter to it; with the usual draw."""
        settings = {key: value for key, value in self.settings if key != "selection_seed"}
        return group_of(method, self.ratio, settings)


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
    # A selection_seed of None is the usual draw.
    known = {key: value for key, value in settings.items() if key != "selection_seed" or value is not None}
    kept = tuple((key, value) for key, value in sorted(known.items()) if matters(key, method))
    return Group(method, None if method == FULL else ratio, kept)


def plan(
    recipe: Recipe,
    methods: Sequence[str],
    ratios: Sequence[float],
    seeds: Sequence[int],
    over: Mapping[str, Sequence[Any]],
    equal: Equal | None = None,
    random_at_equal_cost: bool = False,
    controls: Sequence[float] | Literal["auto"] = (),
) -> list[Trial]:
    """All trials, each once. All methods of a seed come together, so that the first ones done can be compared.

    Args:
        equal: see `predicted_cost.fitted`.
        random_at_equal_cost: also random pruning at the ratios at which it costs what the other methods do.
        controls: also random pruning without window and full data for fewer steps, at these costs relative to full
            data; "auto": see `control_costs`.
    """
    for key, option in _OF_PLAN.items():
        if key in over:
            raise ValueError(f"{key} is not swept by --over, but by {option}")
    draws = over.get("selection_seed", ())
    if None in draws and (own := set(draws) & set(seeds)):
        raise ValueError(
            f"selection_seed={min(own)} is one of --seeds, for which null draws the same: the run would be compared "
            "with itself. Take one that is none of them"
        )
    trials: dict[tuple[Group, int], Trial] = {}
    changes = [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]
    for settings, ratio, seed, method in itertools.product(changes, ratios, seeds, methods):
        trial = _trial(recipe, method, ratio, settings, seed)
        fitting = fitted(trial.recipe, equal)
        if trial.group.method in CONTROLS:
            random = _trial(recipe, "random", ratio, settings, seed).recipe
            random = random.with_settings(fitted(random, equal))
            trial = _trial(recipe, method, control_ratio(random), settings, seed)
        elif fitting:
            trial = _trial(recipe, method, fitting.pop("prune_ratio"), {**settings, **fitting}, seed)
        trials.setdefault((trial.group, seed), trial)
        if random_at_equal_cost and trial.recipe.prunes:
            rival = _trial(recipe, "random", random_ratio(trial.recipe), settings, seed)
            trials.setdefault((rival.group, seed), rival)
    costs = control_costs(trials.values()) if controls == "auto" else controls
    for settings, cost, seed, method in itertools.product(changes if costs else [], costs, seeds, CURVES):
        if not 0 < cost < 1:
            raise ValueError(f"--controls takes costs relative to full data, between 0 and 1, got {cost:g}")
        settings = {key: value for key, value in settings.items() if key != "selection_seed"}
        trial = _trial(recipe, method, round(1 - cost, 4), settings, seed)
        trials.setdefault((trial.group, seed), trial)
        full = _trial(recipe, FULL, 0.0, settings, seed)  # the upper end of the curves
        trials.setdefault((full.group, seed), full)
    return list(trials.values())


def control_costs(trials: Iterable[Trial]) -> list[float]:
    """Costs for the controls, from the cheapest run up to full data: neighbours differ by at most a quarter, and with
    full data there are at least three. The cheapest run has a control at exactly its own cost."""
    cheapest = min((predicted_cost(trial.recipe).run for trial in trials), default=1.0)
    if cheapest >= 1:
        raise ValueError("--controls auto needs a method that prunes; name costs, like --controls 0.5,0.7")
    intervals = max(2, math.ceil(round(math.log(1 / cheapest, _FURTHEST), 6)))
    return [cheapest ** (1 - i / intervals) for i in range(intervals)]


def _trial(recipe: Recipe, method: str, ratio: float, settings: dict[str, Any], seed: int) -> Trial:
    group = group_of(method, ratio, settings)
    chosen: dict[str, Any] = {"method": group.method, "seed": seed, **dict(group.settings)}
    if group.ratio is not None:
        chosen["prune_ratio"] = group.ratio
    return Trial(group, seed, recipe.with_settings(chosen))


def matters(key: str, method: str) -> bool:
    """Whether a setting affects a method."""
    section = key.split(".")[0]
    if section == "window" and without_window(method):
        return False
    if section == "coreset":  # which file it is follows from the other settings
        return method in METHODS and METHODS[method].once and key not in ("coreset.file", "coreset.content")
    if method in (FULL, *WHOLE_BATCHES):
        return section not in ("window", "cut", "selection_seed", *IMPLEMENTATIONS)
    known = METHODS[method]
    if section == "cut":
        return known.needs == "features"
    return section == known.implementation or section not in IMPLEMENTATIONS
