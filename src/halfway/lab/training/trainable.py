"""Whether a recipe can be trained, found out before data are read and other runs are trained."""

from __future__ import annotations

import torch

from ...functional import retained_count
from ...modules import find_layer
from ...selectors.class_balanced import ClassBalanced
from ..recipes import controls
from ..recipes.schema import Recipe
from . import recorders, tasks


def check_trainable(recipe: Recipe, ranks: int = 1) -> None:
    """Raise if a recipe cannot be trained by so many processes."""
    task = tasks.make(recipe)
    selector = recipe.selector(loss_fn=task.loss_for(recipe))
    size = controls.batch_size(recipe, ranks) // ranks
    left = size if selector is None else retained_count(size, recipe.ratios.largest)
    recipe.sampler(samples=1000, per_epoch=10)  # raises if its settings are wrong
    recorders.check(recipe)
    if recipe.task == "segmentation" and recipe.method == ClassBalanced.name:
        raise ValueError("the method 'class_balanced' needs one class per image, which segmentation has not")
    needed = task.smallest_batch
    if left < needed:
        raise ValueError(
            f"{left} of {recipe.batch_size // ranks} samples would be retained per rank, but {recipe.task} needs "
            f"{needed}: BatchNorm of the ASPP's image pooling has one value per image. Take a larger batch_size, fewer "
            "ranks or a smaller ratio"
        )
    if recipe.pruning is not None and recipe.pruning.needs == "features" and ":" not in recipe.model.name:
        try:
            with torch.device("meta"):
                model = recipe.network()
        except (NotImplementedError, RuntimeError):  # it needs real values while it is built; the blocker will check
            return
        find_layer(model, recipe.cut)
