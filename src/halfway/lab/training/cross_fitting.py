"""Irreducible losses for all training images: each fold is scored by a model trained on the others.

    FOLDER/fold-K/      a run folder each, see `irreducible.Scoring`
    FOLDER/losses.pt    what came out, see `irreducible`

beside what every such file holds: {"folds": (N,) int64, "fold_means": (K,) float64, "made_from": {...}}. Models differ
in how good they are as a whole, which says nothing about a sample: each fold's mean is subtracted from its losses, and
the mean of all is added. Adding `fold_means[folds] - losses' mean` gives the losses as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import data
from ..files import write_tensors
from ..recipes.predicted_cost import SampleFlops, sample_flops
from ..recipes.schema import Recipe
from . import session
from .irreducible import read_scores
from .run_folder import RunFolder
from .run_result import RunResult
from .trainable import check_trainable

FILE = "losses.pt"


def fold_recipes(recipe: Recipe, folds: int) -> list[Recipe]:
    """The recipe on all data, without each of the folds in turn."""
    if folds < 2:
        raise ValueError(f"--folds must be at least 2, got {folds}: each is scored by a model trained on the others")
    if recipe.data.holdout or recipe.data.fold is not None:
        raise ValueError("every image is held out in its turn here: leave data.holdout and data.fold alone")
    return [recipe.with_settings({"method": "full", "data.fold": [k, folds]}) for k in range(folds)]


def folder_of(folder: Path, fold: int) -> RunFolder:
    return RunFolder(folder / f"fold-{fold}")


def check(recipes: Sequence[Recipe], folder: Path) -> list[int]:
    """Raise unless all folds can be trained here; returns those that are not finished. Nothing is written."""
    todo = []
    for fold, recipe in enumerate(recipes):
        run = folder_of(folder, fold)
        run.check(recipe, resume=True)
        check_trainable(recipe)
        if not (run.config.exists() and RunResult.read(run.path).finished):
            run.check_checkpoint()
            todo.append(fold)
        elif not run.held_out.exists():
            raise ValueError(f"{run.held_out} is gone; put it back, or remove {run.path} to train this fold again")
    sample_flops(recipes[0])  # a network that cannot be counted is refused here, before it is trained
    return todo


def train(recipes: Sequence[Recipe], todo: Sequence[int], folder: Path, device: torch.device, command: str) -> bool:
    """Train the folds, one after the other, from where each stopped. Returns False after Ctrl-C."""
    for fold in todo:
        recipe = recipes[fold]
        loaded = data.load(recipe.data, recipe.root, device)
        run = folder_of(folder, fold)
        if session.first_rank():
            print(f"{run.path.name}: {loaded.description}", flush=True)
        if not session.train(recipe, loaded, device, run, resume=True, command=command):
            return False
        if session.first_rank():
            found = _scores(run)
            last = RunResult.read(run.path)
            print(
                f"  {last.score:.2f} % {recipe.score_name}; lowest loss of the fold: {found['mean']:.4f}, at step "
                f"{found['step']:,} of {last.steps:,}",
                flush=True,
            )
    return True


def write(recipes: Sequence[Recipe], whole: Recipe, folder: Path, command: str) -> dict[str, Any]:
    """Put the finished folds together in `FOLDER/losses.pt`; returns its content.

    whole: the recipe whose runs will use the losses, on all its data: the unit of the cost. Its network may differ.
    """
    runs = [RunResult.read(folder_of(folder, fold).path) for fold in range(len(recipes))]
    found = [_scores(folder_of(folder, fold)) for fold in range(len(recipes))]
    losses_N, fold_N = _together(found)
    means = torch.tensor([score["mean"] for score in found], dtype=torch.float64)
    proxy, unit = sample_flops(recipes[0]), run_flops(whole, len(losses_N))
    flops = [_fold_flops(run, len(score["ids"]), proxy) for run, score in zip(runs, found, strict=True)]
    content = {
        "losses": centred(losses_N, fold_N, means),
        "folds": fold_N,
        "fold_means": means,
        "recipe": whole.name,
        "holdout": True,
        "cost": {"flops": sum(flops), "runs": sum(flops) / unit, "folds": [spent / unit for spent in flops]},
        "made_from": {
            "command": command,
            "settings": recipes[0].with_settings({"data.fold": None}).as_dict(),
            "folds": len(recipes),
            "seeds": [recipe.seed for recipe in recipes],
            "steps": [score["step"] for score in found],
            "scores": [run.score for run in runs],
            "versions": runs[-1].sessions[-1]["versions"],
            "date": runs[-1].sessions[-1]["date"],
        },
    }
    write_tensors(folder / FILE, content)
    return content


def centred(losses_N: Tensor, fold_N: Tensor, means_K: Tensor) -> Tensor:
    """(N,) float32: the losses minus their fold's mean, plus the mean of all."""
    double_N = losses_N.double()
    return (double_N - means_K[fold_N] + double_N.mean()).float()


def _fold_flops(run: RunResult, images: int, flops: SampleFlops) -> float:
    """What a fold cost: its training, and a forward pass of each of its images whenever they were scored."""
    scored = sum("held_out_loss" in metrics for metrics in run.metrics)
    return float(run.metrics[-1]["spent"] * flops.step + scored * images * flops.forward)


def run_flops(recipe: Recipe, samples: int) -> float:
    """What a run of the recipe costs that trains on all of so many samples."""
    steps = recipe.length * (samples // recipe.batch_size if recipe.unit == "epoch" else 1)
    return steps * recipe.batch_size * sample_flops(recipe).step


def _scores(run: RunFolder) -> dict[str, Any]:
    found = read_scores(run)
    if found is None:
        raise ValueError(f"the fold of {run.path} never had a finite loss; lower optimizer.lr, or set clip_norm")
    return found


def _together(scores: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """(N,) the losses by id, and (N,) the fold of each."""
    count = scores[0]["of"]
    losses_N = torch.full((count,), torch.nan)
    fold_N = torch.full((count,), -1)
    for fold, score in enumerate(scores):
        losses_N[score["ids"]] = score["losses"]
        fold_N[score["ids"]] = fold
    # Other images in the folder than when the first fold was trained would be split otherwise.
    if sum(len(score["ids"]) for score in scores) != count or bool((fold_N < 0).any()):
        raise ValueError(
            f"the folds do not cover each of the {count:,} training images once, so the images have changed since the "
            "first fold was trained; train again in another folder (--out)"
        )
    return losses_N, fold_N
