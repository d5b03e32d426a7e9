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
from ..training import session
from ..training.rank import wait_for_all
from .run import Loader
from .trials import Trial


def with_subsets(trials: Sequence[Trial], folder: Path, device: torch.device, command: str) -> list[Trial] | None:
    """The trials with their subset files, which are made if they are not there; None after Ctrl-C."""
    choices = {i: _choice(trial, folder) for i, trial in enumerate(trials) if trial.recipe.chosen_once}
    for choice in choices.values():
        choice.check()
    load, out = Loader(device), list(trials)
    for i, choice in choices.items():
        data = load(choice.recipe)
        labels_N = data.train.labels
        assert labels_N is not None
        known = choice.made_already(labels_N) is not None
        wait_for_all()  # or a rank could find what another has just written, and not take part
        if not known:
            if session.first_rank():
                print(f"choosing {choice.file}", flush=True)
            if choice.make(data, device, command) is None:
                return None
        file = {"coreset.file": str(choice.file), "coreset.content": None}
        out[i] = dataclasses.replace(trials[i], recipe=pinned(trials[i].recipe.with_settings(file)))
    return out


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
