"""The work of `halfway compare`: trains all trials, and times their steps side by side.

    FOLDER/METHOD-RATIO-sSEED/     a run folder each
    FOLDER/timing.json             wall time of a step, relative to full training
    FOLDER/table.md, results.json  what came out

Accuracy comes from the runs. Wall time does not, because a machine is never equally busy in two runs: it is measured at
the end, in rounds of one pruned step of each method on the same batch, and only ratios within a round count.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..bench.measure import Clock, interleaved, quartiles
from ..data import Data
from ..data.loader import Loader
from ..environment import environment
from ..files import write_json
from ..recipes.methods import FULL, SHORTER
from ..recipes.schema import Recipe
from ..training import session
from ..training.loop import Training
from ..training.run_folder import RunFolder
from ..training.run_result import RunResult
from ..training.trainable import check_trainable
from . import pool
from .trials import Group, Trial

WARM_UP = 3


def check(trials: Sequence[Trial], folder: Path) -> list[Trial]:
    """Raise unless all trials can be trained here; returns those that are not finished. Nothing is written."""
    for trial in trials:  # what is done must be of the same recipe, too
        RunFolder(folder / trial.folder).check(trial.recipe, resume=True)
    for recipe in {trial.group: trial.recipe for trial in trials}.values():
        check_trainable(recipe)
    done = finished(trials, folder)
    todo = [trial for trial in trials if trial.seed not in done.get(trial.group, {})]
    for trial in todo:
        RunFolder(folder / trial.folder).check_checkpoint()
    if len(todo) < len(trials):
        _say(f"{len(trials) - len(todo)} of {len(trials)} runs are done already")
    return todo


def train_all(trials: Sequence[Trial], folder: Path, device: torch.device, command: str, workers: int = 1) -> bool:
    """Train them from where each stopped, one after the other or in several processes. Returns False after Ctrl-C."""
    if workers > 1 and trials:
        return _train_side_by_side(trials, folder, command, workers)
    load = Loader(device)
    for i, trial in enumerate(trials):
        _say(f"run {i + 1} of {len(trials)}: {trial.group.label}, seed {trial.seed}")
        run_folder = RunFolder(folder / trial.folder)
        if not session.train(trial.recipe, load(trial.recipe), device, run_folder, resume=True, command=command):
            return False
        if session.first_rank():
            _say(f"  {RunResult.read(run_folder.path).score:.2f} %")
    return True


def _train_side_by_side(trials: Sequence[Trial], folder: Path, command: str, workers: int) -> bool:
    jobs = [pool.Job(t.recipe, folder / t.folder, f"{t.group.label}, seed {t.seed}") for t in trials]
    try:
        failed = pool.train(jobs, workers, command, lambda i: f"{RunResult.read(jobs[i].folder).score:.2f} %")
    except KeyboardInterrupt:
        return False
    if failed:
        raise ValueError(f"{failed} of {len(jobs)} runs failed, see above; the same command trains what is left")
    return True


def finished(trials: Sequence[Trial], folder: Path) -> dict[Group, dict[int, RunResult]]:
    """The finished runs, by group and seed."""
    out: dict[Group, dict[int, RunResult]] = {}
    for trial in trials:
        path = folder / trial.folder
        if (path / "config.yaml").exists() and (run := RunResult.read(path)).finished:
            out.setdefault(trial.group, {})[trial.seed] = run
    return out


def time_steps(
    groups: Sequence[Group],
    recipes: dict[Group, Recipe],
    device: torch.device,
    rounds: int,
    shares: Mapping[Group, float],
) -> dict[str, Any]:
    """Wall time of a pruned step of each group relative to a full one: median and quartiles over rounds.

    The groups take turns on the same batch, in rotating order. Groups whose recipe differs in more than the pruning
    (another batch size, say) are timed against full training with their own settings.

    Args:
        shares: for methods that decide before the epoch, the share of an epoch's steps that is left. Each of their
            steps is a full one.
    """
    load = Loader(device)
    timings: dict[str, Any] = {}
    families: dict[Group, list[Group]] = {}
    for group in groups:
        families.setdefault(group.rival_full, []).append(group)
    for full, members in families.items():
        shorter = [group for group in members if group.method == SHORTER]  # the same steps, and fewer of them
        timings.update({group.label: {"median": 1.0, "q1": 1.0, "q3": 1.0, "rounds": rounds} for group in shorter})
        recipe = recipes[members[0]].with_settings({"method": FULL})
        steps = {"full": _stepper(recipe, load(recipe), device)}
        for group in members:
            if group != full and group not in shorter:
                steps[group.label] = _stepper(recipes[group], load(recipes[group]), device)
        for step in steps.values():
            for _ in range(WARM_UP):
                step()
        taken = interleaved(steps, rounds, Clock(device), "timing steps")
        whole = [step.total for step in taken["full"]]
        for label in steps:
            name = full.label if label == "full" else label
            share = next((share for group, share in shares.items() if group.label == name), 1.0)
            ratios = [share * mine.total / full_seconds for mine, full_seconds in zip(taken[label], whole, strict=True)]
            timings[name] = {**quartiles(ratios), "rounds": rounds}
    return timings


def timing(
    trials: Sequence[Trial],
    folder: Path,
    device: torch.device,
    rounds: int,
    results: Mapping[Group, Mapping[int, RunResult]],
) -> Any:
    """The timing in the folder, measured again if it does not cover all groups. results: the finished runs."""
    path = folder / "timing.json"
    known = json.loads(path.read_text()) if path.exists() else {"steps": {}}
    recipes = {trial.group: trial.recipe for trial in trials}
    if rounds and any(group.label not in known["steps"] for group in recipes):
        shares = {
            group: statistics.fmean(1 - run.effective_ratio[0] for run in runs.values())
            for group, runs in results.items()
            if (method := recipes[group].pruning) is not None and method.before_epoch
        }
        steps = time_steps(list(recipes), recipes, device, rounds, shares)
        known = {"steps": steps, **environment(device)}
        write_json(path, known)
    return known


def _stepper(recipe: Recipe, loaded: Data, device: torch.device) -> Callable[[], Any]:
    """A function that takes one pruned training step, always on the same batch."""
    if recipe.pruning is not None and not recipe.pruning.before_epoch:
        recipe = dataclasses.replace(recipe, window=(0, None))  # the first step prunes already
    trained = Training(recipe, loaded, device, show=False)
    trained.model.train()
    if trained.sampler is not None:
        trained.sampler.set_epoch(0)
    batch = next(iter(loaded.train.batches(trained.order.epoch(0)[:1])))

    return lambda: trained.train_step(*batch)


def _say(text: str) -> None:
    if session.first_rank():
        print(text, flush=True)
