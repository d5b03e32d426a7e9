"""The losses of a trained model on images that it was not trained on: what RHO-Loss calls irreducible losses.

A file of them holds one loss per training image and what it cost. It comes from a model that was trained on other
images (`data.holdout=true`, see `save`), or from several, each trained on all folds but one (`cross_fitting`).

    {"losses": (N,) float32 by id, "recipe": name, "holdout": whether no model has seen the images it scored,
     "cost": {"flops": of training and scoring, "runs": the same in runs of the recipe on all its data}, ...}
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import data
from ..data import HeldOut, TrainSet
from ..files import write_tensors
from ..progress import Bar
from ..recipes.predicted_cost import sample_flops
from ..recipes.schema import Recipe
from . import tasks
from .rank import rank_and_size
from .run_folder import RunFolder
from .run_result import RunResult


def save(recipe: Recipe, folder: RunFolder, device: torch.device, path: Path) -> None:
    """Write the losses of a finished run's model on the images that the recipe trains on without `holdout`."""
    state = folder.load()
    if state is None or not state["finished"]:
        raise ValueError(f"the run in {folder.path} is not finished, so its losses mean little; go on with --resume")
    losses_N = evaluate(recipe, state["model"], device)
    result, flops = RunResult.read(folder.path), sample_flops(recipe)
    spent = result.metrics[-1]["spent"] * flops.step + len(losses_N) * flops.forward
    cost = {"flops": spent, "runs": spent / (result.steps * recipe.batch_size * flops.step)}
    write_tensors(path, {"losses": losses_N, "recipe": recipe.name, "holdout": recipe.data.holdout, "cost": cost})


def read_cost(path: Path) -> float | None:
    """The FLOPs that a file of losses took to make; None if it is gone, or does not say."""
    if not path.is_file():
        return None
    found = torch.load(path, map_location="cpu", weights_only=True)
    cost = found.get("cost") if isinstance(found, dict) else None
    return float(cost["flops"]) if isinstance(cost, dict) else None


def evaluate(recipe: Recipe, weights: dict[str, Tensor], device: torch.device) -> Tensor:
    """(N,) float32: the plain loss of each image the recipe trains on without `holdout`; not augmented, eval mode."""
    settings = dataclasses.replace(recipe.data, holdout=False, augment="none")
    train = data.load(settings, recipe.root, device).train
    model = recipe.network()
    model.load_state_dict(weights)
    return losses_of(model.to(device), train, recipe, device).cpu()


@torch.no_grad()
def losses_of(model: nn.Module, images: TrainSet, recipe: Recipe, device: torch.device) -> Tensor:
    """(N,) float32 on the device: the loss of each image, without label smoothing and in eval mode. All ranks share the
    work and get all losses."""
    task = tasks.make(recipe)
    rank, ranks = rank_and_size()
    mine = torch.arange(rank, len(images), ranks)
    losses_N = torch.zeros(len(images), device=device)
    was_training = model.training
    model.eval()
    try:
        with Bar(len(mine), "losses of images", "image", show=rank == 0, leave=False) as bar:
            for x, y, ids in images.batches([(ids, 0) for ids in mine.split(recipe.evaluation_batch)]):
                with tasks.autocast(recipe, device):
                    losses_N[ids] = task.plain_losses(model(x), y).float()
                bar.update(len(x))
    finally:
        model.train(was_training)
    if ranks > 1:
        dist.all_reduce(losses_N)
    return losses_N


class Scoring:
    """Scores the fold that a training leaves out, and keeps the losses of the moment when their mean was lowest.

    They are in `held_out.pt` of the run folder, which is written before the checkpoint: a run that is killed in between
    scores the same weights again. {"ids": (n,) int64, "losses": (n,) float32, "mean": float, "step": int, "of": N}

    Args:
        folder: of the run; None: nothing is written.
    """

    def __init__(self, recipe: Recipe, held_out: HeldOut, device: torch.device, folder: RunFolder | None) -> None:
        self.recipe, self.held_out, self.device, self.folder = recipe, held_out, device, folder
        self.best: dict[str, Any] | None = None if folder is None else read_scores(folder)

    def __call__(self, model: nn.Module, step: int) -> float:
        """The mean loss of the fold now. Plain losses: smoothing would put a floor under them."""
        losses_n = losses_of(model, self.held_out.images, self.recipe, self.device).cpu()
        mean = losses_n.double().mean().item()
        if math.isfinite(mean) and (self.best is None or mean < self.best["mean"]):
            found = {"ids": self.held_out.ids, "losses": losses_n, "mean": mean, "step": step, "of": self.held_out.of}
            self.best = found
            if self.folder is not None and rank_and_size()[0] == 0:
                write_tensors(self.folder.held_out, found)
        return mean


def read_scores(folder: RunFolder) -> dict[str, Any] | None:
    """What `Scoring` has kept in the folder; None if there is nothing yet."""
    if not folder.held_out.exists():
        return None
    found: dict[str, Any] = torch.load(folder.held_out, map_location="cpu", weights_only=True)
    return found
