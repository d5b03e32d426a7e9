"""The report's last section: commands, settings and machine, to judge the numbers and to repeat them."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

from ..data.settings import VARIANTS
from ..recipes import reading
from ..recipes import schema as recipes
from ..recipes.schema import Recipe
from ..training.run_result import RunResult
from .runs import Runs


def how_it_was_measured(runs: Runs) -> dict[str, Any]:
    """Commands, settings and facts about the runs, for `page.html`."""
    example = runs.example
    return {
        "facts": _facts(runs, example),
        "commands": list(dict.fromkeys(s["command"] for run in runs.finished for s in run.sessions)),
        "example": example.path.name,
        "again": repeat_command(example),
    }


def repeat_command(run: RunResult) -> str:
    """`halfway train` with everything that differs from the shipped recipe."""
    r = run.recipe
    where = [] if r.root == "data" else ["--data", "DIR" if PurePath(r.root).is_absolute() else r.root]
    ratio = (
        [f"prune_ratio={r.prune_ratio}"] if isinstance(r.prune_ratio, dict) else ["--prune-ratio", f"{r.prune_ratio:g}"]
    )
    pruned = ratio if run.recipe.prunes else []
    chosen = ["--method", run.method, *pruned]
    if r.chosen_once and r.coreset.file is not None:
        file = PurePath(r.coreset.file)
        chosen = ["--subset", file.name if file.is_absolute() else str(file)]
    options = [*where, *chosen, "--seed", str(r.seed)]
    if r.name not in reading.names():
        return shlex.join(["halfway", "train", f"{run.path.name}/config.yaml", *where])
    return shlex.join(["halfway", "train", r.name, *_changes(r), *options])


def _changes(recipe: Recipe) -> list[str]:
    """key=value of every setting that differs from the shipped recipe."""
    of_this_run = {key: getattr(recipe, key) for key in recipes.OF_A_RUN}
    shipped, now = reading.load(recipe.name).with_settings(of_this_run).identity(), recipe.identity()
    now |= {key: recipe.get(key) for name in VARIANTS if (key := f"data.{name}") in shipped}  # also at its default
    return [f"{key}={_yaml(now[key])}" for key in now if now[key] != shipped.get(key) and key != "coreset.content"]


def _yaml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _facts(runs: Runs, example: RunResult) -> list[tuple[str, str]]:
    r, finished = example.recipe, runs.finished
    session = example.sessions[-1]
    start, stop = r.window
    rate = r.learning_rate
    warmup = "" if rate.warmup is None else f", warm-up {rate.warmup:g} {r.unit}s"
    options = _listed(r.optimizer.options)
    return [
        ("Data", f"{session['data']}; {r.data.size[0]} × {r.data.size[1]} px, augmentation {r.data.augment}"),
        ("Model", r.model.name + (f" ({_listed(r.model.options)})" if r.model.options else "")),
        ("Length", f"{r.length:,} {r.unit}s, {example.steps:,} steps of {r.batch_size} samples, {r.precision}"),
        (
            "Optimizer",
            f"{r.optimizer.name}, learning rate {r.optimizer.lr:g}, {rate.name}{warmup}; {_decay(r)}{options}",
        ),
        ("Pruning", f"{r.unit}s {start + 1:,} to {r.length if stop is None else stop:,}; PFB at {r.cut}"),
        ("Density", _listed(r.methods.get("density", {}))),
        *_chosen_by_density(runs),
        *_varied(runs),
        ("Runs", f"{len(finished)} finished, {_duration(sum(run.seconds for run in finished))} of training in all"),
        ("Waiting for data", f"{_waited(finished):.1%} of the training time"),
        ("Pruned steps", _replayed(finished)),
        ("Machine", _machines(finished)),
        (
            "Versions",
            _joined((f"{k} {v}" for run in finished for s in run.sessions for k, v in s["versions"].items()), ", "),
        ),
        ("Date", _joined(sorted({s["date"] for run in finished for s in run.sessions}), ", ")),
    ]


def _chosen_by_density(runs: Runs) -> list[tuple[str, str]]:
    """How much the noise left to the density; nothing where no run says."""
    telling = {
        group: [run for run in seeds.values() if run.chosen_by_density is not None]
        for group, seeds in runs.groups.items()
    }
    shares = [
        f"{group.label}: {statistics.fmean(run.chosen_by_density or 0.0 for run in found):.2f} (n = {len(found)})"
        for group, found in telling.items()
        if found
    ]
    if not shares:
        return []
    resumed = any(len(run.sessions) > 1 for found in telling.values() for run in found)
    return [
        (
            "Chosen by density",
            f"{'; '.join(shares)}. The share of the choice that the density made and not the noise: 1 is all of it, 0 "
            f"no more than chance.{' Of a resumed run, from then on.' if resumed else ''}",
        )
    ]


def _varied(runs: Runs) -> list[tuple[str, str]]:
    keys = list(dict.fromkeys(key for group in runs.groups for key, _ in group.settings))
    if not keys:
        return []
    values = {k: dict.fromkeys(str(v) for g in runs.groups for key, v in g.settings if key == k) for k in keys}
    return [("Varied", "; ".join(f"{key} = {', '.join(found)}" for key, found in values.items()))]


def _replayed(runs: Sequence[RunResult]) -> str:
    """How many pruned steps reused their probe."""
    last = [run.metrics[-1] for run in runs]
    pruned, replayed, recomputed = (
        int(sum(m.get(key, 0) for m in last)) for key in ("pruned_steps", "replayed", "recomputed")
    )
    if not replayed + recomputed:
        return f"{pruned:,}, none of which had a probe"
    return (
        f"{pruned:,}; of those with a probe {replayed:,} reused what it had computed and {recomputed:,} "
        "computed it once more"
    )


def _machines(runs: Sequence[RunResult]) -> str:
    return _joined(
        f"{s['machine']['cpu']}, {s['machine']['cores']} cores, {s['threads']} thread(s) per run"
        + ("" if s["machine"]["device"] == "cpu" else f", {s['machine']['device']}")
        for run in runs
        for s in run.sessions
    )


def _waited(runs: Sequence[RunResult]) -> float:
    return sum(run.waited * run.seconds for run in runs) / sum(run.seconds for run in runs)


def _decay(recipe: Recipe) -> str:
    more = ", " if recipe.optimizer.options else ""
    return f"weight decay {recipe.optimizer.weight_decay:g}{more}"


def _listed(values: dict[str, object]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in values.items())


def _joined(parts: Iterable[str], between: str = "; ") -> str:
    """The parts joined, each once."""
    return between.join(dict.fromkeys(parts))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
