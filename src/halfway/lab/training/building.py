"""The network of a recipe, and the blocker that prunes its batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...blocker.blocker import ForwardBlocker
from ...selectors.proxy import Proxy
from ..data import Data
from ..models import speedrun
from ..recipes.schema import Recipe
from .tasks import Task

# A layer that is computed from images sees that many of them.
PREPARED_ON = 5000


def network(recipe: Recipe, data: Data, device: torch.device, ranks: int) -> tuple[nn.Module, nn.Module]:
    """The network on the device, and the same as it is called in training: wrapped, if there are several ranks."""
    model: nn.Module = recipe.network(weights=recipe.model.weights)
    model.to(device)
    if recipe.model.weights is None:
        speedrun.prepare(model, lambda: _first_images(data))
    if recipe.channels_last:
        model.to(memory_format=torch.channels_last)
    if ranks == 1:
        return model, model
    on = [device.index] if device.type == "cuda" else None
    return model, DistributedDataParallel(model, device_ids=on)


def blocker(recipe: Recipe, data: Data, model: nn.Module, task: Task) -> ForwardBlocker | None:
    """None if the method does not decide within the batch. model: as it is called in training."""
    labels = data.train.labels
    counts = None if labels is None else torch.bincount(labels.cpu(), minlength=recipe.data.classes)
    loss_fn = task.loss_for(recipe)
    selector = recipe.selector(loss_fn=loss_fn, num_samples=len(data.train), class_counts=counts)
    if selector is None:
        return None
    if isinstance(selector, Proxy):
        speedrun.prepare(selector.model, lambda: _first_images(data))
    return ForwardBlocker(
        model,
        recipe.cut if selector.needs == "features" else None,
        recipe.ratio_by_position,
        selector=selector,
        schedule=recipe.schedule,
        seed=recipe.draw_seed,
    )


def _first_images(data: Data) -> Tensor:
    """Training images as they are, in their order: the same for every seed, method and rank."""
    return next(iter(data.trained_on.batches(PREPARED_ON)))[0]
