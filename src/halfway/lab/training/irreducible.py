"""The loss of a trained model on each training image. If the model was trained on other images (`data.holdout=true`),
these are what RHO-Loss calls irreducible losses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from .. import data
from ..files import write_tensors
from ..models import small as nets
from ..progress import Bar
from ..recipes.schema import Recipe
from . import tasks
from .run_folder import RunFolder


def save(recipe: Recipe, folder: RunFolder, device: torch.device, path: Path) -> None:
    """Write {"losses": (N,) float32 by id, "recipe": name, "holdout": whether the model has not seen the images}."""
    state = folder.load()
    if state is None or not state["finished"]:
        raise ValueError(f"the run in {folder.path} is not finished, so its losses mean little; go on with --resume")
    losses_N = evaluate(recipe, state["model"], device)
    write_tensors(path, {"losses": losses_N, "recipe": recipe.name, "holdout": recipe.data.holdout})


@torch.no_grad()
def evaluate(recipe: Recipe, weights: dict[str, Tensor], device: torch.device) -> Tensor:
    """(N,) float32: the loss of each image the recipe trains on without `holdout`, not augmented, in eval mode."""
    settings = dataclasses.replace(recipe.data, holdout=False, augment="none")
    train = data.load(settings, recipe.root, device).train
    model = nets.build(
        recipe.model.name, recipe.data.classes, recipe.model.options, None, recipe.seed, recipe.data.size[0]
    )
    model.load_state_dict(weights)
    model.to(device).eval()
    task = tasks.make(recipe)
    plan = [(ids, 0) for ids in torch.arange(len(train)).split(recipe.evaluation_batch)]
    losses_N = torch.empty(len(train), device=device)
    with Bar(len(train), "losses of the training images", "image", leave=False) as bar:
        for x, y, ids in train.batches(plan):
            with tasks.autocast(recipe, device):
                losses_N[ids] = task.losses(model(x), y).float()
            bar.update(len(x))
    return losses_N.cpu()
