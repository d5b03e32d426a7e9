"""The subsets of a comparison: each method that decides once chooses before the runs begin, at every seed anew.

The proxies are trained in `coresets-RECIPE` beside the comparison's folder, where `halfway coreset` finds them too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from ..coresets.choose import Choice
from ..coresets.chosen import pinned
from ..coresets.proxies import ProxyOptions
from ..data.loader import Loader
from ..training import session
from ..training.rank import wait_for_all
from . import pool
from .trials import Trial


def with_subsets(
    trials: Sequence[Trial], folder: Path, device: torch.device, command: str, workers: int = 1
) -> list[Trial] | None:
    """The trials with their subset files, which are made if they are not there; None after Ctrl-C.

    workers: processes that train proxies.
    """
    choices = {i: _choice(trial, folder) for i, trial in enumerate(trials) if trial.recipe.chosen_once}
    for choice in choices.values():
        choice.check()
    load, out = Loader(device), list(trials)
    for choice in choices.values():
        choice.check_on(load(choice.recipe))
    if workers > 1 and not _train_proxies([c for c in choices.values() if not _made(c, load)], command, workers):
        return None
    for i, choice in choices.items():
        known = _made(choice, load)
        wait_for_all()  # or a rank could find what another has just written, and not take part
        if not known:
            if session.first_rank():
                print(f"choosing {choice.file}", flush=True)
            if choice.make(load(choice.recipe), device, command) is None:
                return None
        file = {"coreset.file": str(choice.file), "coreset.content": None}
        out[i] = dataclasses.replace(trials[i], recipe=pinned(trials[i].recipe.with_settings(file)))
    return out


def _made(choice: Choice, load: Loader) -> bool:
    return choice.made_already(load(choice.recipe)) is not None


def _train_proxies(choices: Sequence[Choice], command: str, workers: int) -> bool:
    """Train what the choices will look at, side by side; False after Ctrl-C. What fails here fails again, with its own
    error, when the choice is made."""
    sets = [proxies for choice in choices if (proxies := choice.proxies) is not None]
    runs = {run.path: recipe for each in sets for recipe, run in each.unfinished()}
    jobs = [pool.Job(recipe, path, f"proxy {path.name}") for path, recipe in runs.items()]
    try:
        pool.train(jobs, workers, command, lambda _: "trained")
    except KeyboardInterrupt:
        return False
    return True


def _choice(trial: Trial, folder: Path) -> Choice:
    recipe = trial.recipe
    if recipe.coreset.file is not None:
        raise ValueError("`halfway compare` makes the subset of each method, ratio and seed itself; drop coreset.file=")
    return Choice(
        recipe.method,
        recipe,
        round(1 - recipe.require_one_ratio(recipe.method), 6),
        folder.parent / f"coresets-{recipe.name}",
        recipe.draw_seed,
        recipe.coreset.class_balance,
        options=ProxyOptions(epochs=recipe.coreset.proxy_epochs),
        record=None if recipe.coreset.record is None else Path(recipe.coreset.record),
    )
