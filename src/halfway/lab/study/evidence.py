"""What `halfway advise` knows about accuracy: a small extract of a study, for `advice.evidence`.

A stage counts if it has the arm `full`, so that one which tunes learning rates does not; of its seeds those count that
are fresh, if it says which, because what was seen before is why it was planned. Of its arms those count that differ
from their recipe in the method alone (a window or another learning rate is nothing that advice could paste), and that
have two seeds or more. Results are only ever appended to a ledger, so the number of those that were read says which
they are.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..comparison.paired import Difference, difference, residual
from ..files import write_whole
from ..recipes import reading
from ..recipes.methods import FULL, settings_of
from ..recipes.schema import Recipe
from .arms import Arm, arms
from .gains import Gain, gains
from .holm import p_value
from .ledger import last_small_losses
from .plan import Run
from .results import Study

_USUAL_RATIO = 0.5  # of the random pruning whose small losses are given
# What a rung was scored on, and where files were: neither belongs to the method.
_EVALUATED = "data.evaluate"
_FILES = ("losses", "model")
_FEWEST_SEEDS = 2
# Recipes that count as rungs beside the ladders, because nothing but their length and network is special: no wrong
# labels, no rare classes, no copies.
_LADDERS = {"speedrun-cifar10": "speedrun"}
_DIGITS, _P_DIGITS = 3, 4


def write(study: Study, results: int, path: Path) -> None:
    """Write the extract as JSON, one finding per line."""
    content = extract(study, results)
    rungs = [_rung_text(rung) for rung in content["rungs"]]
    head = f'{{"about": {json.dumps(content["about"])}, "results": {results}, "rungs": [\n'
    write_whole(path, head + ",\n".join(rungs) + "\n]}\n")


def _rung_text(rung: Mapping[str, Any]) -> str:
    head = json.dumps({key: value for key, value in rung.items() if key != "findings"})
    findings = "".join(f"\n    {json.dumps(each)}," for each in rung["findings"]).removesuffix(",")
    return f' {head[:-1]}, "findings": [{findings}]}}'


def extract(study: Study, results: int) -> dict[str, Any]:
    """The extract, as plain values. results: how many the ledger had."""
    bases = dict.fromkeys(arm.base for members in study.arms.values() for arm in members if arm.entries)
    rungs = [_rung(study, base) for base in bases]
    entries = {e["key"]: e for members in study.arms.values() for arm in members for e in arm.entries.values()}
    dates = sorted(str(entry["date"]) for entry in entries.values())
    about = f"{len(entries)} runs, {dates[0]} to {dates[-1]}" if dates else ""
    return {"about": about, "results": results, "rungs": [rung for rung in rungs if rung["small"]]}


def _rung(study: Study, base: str) -> dict[str, Any]:
    recipe = reading.load(base)
    plain = _family_of(arms([Run("", FULL, base, 0, recipe.with_settings({"method": FULL}))], [])[0])
    members = [arm for found in study.arms.values() for arm in found if arm.base == base and _family_of(arm) == plain]
    findings = [
        entry
        for found in (_of_fresh_seeds(study, stage) for stage in study.stages)
        for entry in _findings([each for each in found if each.arm.base == base and _family_of(each.arm) == plain])
        if entry is not None
    ]
    small = {role: share for role in ("full", "random") if (share := _small(members, role)) is not None}
    ladder = next((arm.rung[0] for arm in members if arm.rung is not None), _LADDERS.get(base, ""))
    passes = _passes(recipe)
    methods = [_method(arm) for arm in members if arm.role == "method" and arm.entries]
    return {
        "name": base,
        "ladder": ladder,
        "passes": passes,
        "small": small,
        "tried": len({json.dumps(method, sort_keys=True) for method in methods}),
        "findings": findings,
    }


def _of_fresh_seeds(study: Study, stage: str) -> list[Gain]:
    """The gains of a stage; if it says which seeds are fresh, by these alone, and each by its own differences."""
    fresh = study.stages[stage].get("fresh_seeds")
    if not fresh:
        return study.gains[stage]
    members = study.arms[stage]
    only = [replace(arm, entries={s: e for s, e in arm.entries.items() if s in fresh}) for arm in members]
    return gains(only, alone=True)


def _family_of(arm: Arm) -> tuple[tuple[str, Any], ...]:
    return tuple(pair for pair in arm.family if pair[0] != _EVALUATED)


def _small(members: Sequence[Arm], role: str) -> float | None:
    """The share of plain losses below 0.1 in the last round, over all runs of full data or of random pruning."""
    wanted = [arm for arm in members if arm.role == role and arm.entries]
    if role == "random" and wanted:
        nearest = min(abs(float(arm.recipe.prune_ratio) - _USUAL_RATIO) for arm in wanted)  # type: ignore[arg-type]
        wanted = [a for a in wanted if abs(float(a.recipe.prune_ratio) - _USUAL_RATIO) == nearest]  # type: ignore[arg-type]
    runs = {entry["key"]: entry for arm in wanted for entry in arm.entries.values()}
    known = [share for entry in runs.values() if (share := last_small_losses(entry)) is not None]
    return round(statistics.fmean(known), _DIGITS) if known else None


def _passes(recipe: Recipe) -> float | None:
    if recipe.unit == "epoch":
        return recipe.length
    samples = recipe.data.train_samples
    return round(recipe.length * recipe.batch_size / samples, _DIGITS) if samples else None


def _findings(found: Sequence[Gain]) -> list[dict[str, Any] | None]:
    """Of a stage on one recipe."""
    full = next((each.arm for each in found if each.arm.name == FULL), None)
    if full is None:
        return []
    families = {each.arm.name: each.arm.family for each in found}
    pooled = residual({each.arm.name: each.arm.scores for each in found}, families)
    own = [each for each in found if each.arm.role not in ("full", "again")]
    return [_finding(each, difference(each.arm.scores, full.scores, pooled)) for each in own]


def _finding(each: Gain, to_full: Difference | None) -> dict[str, Any] | None:
    """None for an arm with a window, with a ratio that changes, or with a single seed."""
    arm, recipe = each.arm, each.arm.recipe
    start, stop = recipe.schedule.start, recipe.schedule.stop
    whole = not start and (stop is None or stop >= recipe.length)
    if not whole or isinstance(recipe.prune_ratio, dict) or to_full is None:
        return None
    # A control has no gain over itself: the other one is its rival.
    rival = {"random": "shorter", "shorter": "random"}.get(arm.role, each.score.better)
    gain = each.score.differences.get(rival) if rival is not None else None  # type: ignore[call-overload]
    n = to_full.n if gain is None else gain.n
    if min(n, to_full.n) < _FEWEST_SEEDS:
        return None
    p = None if gain is None else p_value(gain)
    return {
        "arm": arm.name,
        "role": arm.role,
        **_method(arm),
        "prune_ratio": recipe.prune_ratio,
        "cost": round(arm.cost, _DIGITS),
        "to_full": _values(to_full),
        "gain": _values(gain),
        "better": rival,
        "n": n,
        "stage": "confirm" if recipe.data.evaluate == "test" else "screen",
        "p": None if p is None else float(f"{p:.{_P_DIGITS}g}"),
    }


def _method(arm: Arm) -> dict[str, Any]:
    """What an arm prunes by, as it can be pasted."""
    method = arm.recipe.pruning
    return {
        "selector": "" if method is None else method.implementation,
        "settings": _settings(arm.recipe),
        "cut": arm.recipe.cut if method is not None and method.needs == "features" else "",
    }


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Of the recipe's method, as far as they are not its defaults."""
    method = recipe.pruning
    if method is None:
        return {}
    defaults = settings_of(method.implementation)
    given = {**recipe.method_settings, **method.preset}
    return {key: value for key, value in given.items() if key not in _FILES and value != defaults.get(key)}


def _values(d: Difference | None) -> list[float | None] | None:
    if d is None:
        return None
    return [None if value is None else round(value, _DIGITS) for value in (d.mean, d.low, d.high)]
