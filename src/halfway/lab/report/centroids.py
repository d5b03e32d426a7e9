"""The heaviest centroids of PFB's density, each with the samples nearest to it at the cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ... import functional
from ...modules import find_layer
from ...seeds import seed_of
from ...selectors import Density
from ...selectors.tools.channels import find_channel_dim
from ..data import Data
from ..progress import Bar
from ..recipes.schema import Recipe
from ..training import tasks

SAMPLES = 2000
_BATCH = 100


@dataclass(frozen=True)
class Centroid:
    """One kernel of the mixture.

    share: of the samples the density has learned from.
    nearest: ids of training samples.
    """

    share: float
    nearest: list[int]


def heaviest(recipe: Recipe, checkpoint: dict[str, Any], data: Data, count: int, nearest: int) -> list[Centroid]:
    """The `count` centroids that stand for the most samples.

    Args:
        recipe: of a finished PFB run.
        checkpoint: of the same run.
        data: what it was trained on, on the CPU.
        nearest: samples for each, of `SAMPLES` that are spread over the training set.
    """
    centroids, counts, x, ids = represent(recipe, checkpoint, data)
    order = counts.argsort(descending=True, stable=True)[:count]
    distances = torch.cdist(centroids[order].double(), x.double(), compute_mode="donot_use_mm_for_euclid_dist")
    found = ids[distances.argsort(dim=1, stable=True)[:, :nearest]]
    shares = counts[order] / counts.sum()
    return [Centroid(float(share), row) for share, row in zip(shares, found.tolist(), strict=True)]


def represent(recipe: Recipe, checkpoint: dict[str, Any], data: Data) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Centroids (C, D) and their counts (C,) at the end of training, and the representations (M, D) of M training
    samples with their ids (M,), as the selector sees them, but in eval mode."""
    learned = checkpoint["blocker"]["selector"]
    if not learned["width"]:
        raise ValueError("the run ended before the density had seen a sample")
    # The checkpoint has the weights; those the training began with may be gone, and are not needed.
    model = recipe.network()
    model.load_state_dict(checkpoint["model"])
    x, ids = _features(recipe, model, data)
    return learned["centroids"][:, : learned["width"]], learned["counts"], x, ids


@torch.no_grad()
def _features(recipe: Recipe, model: nn.Module, data: Data) -> tuple[Tensor, Tensor]:
    selector, train = recipe.selector(), data.train
    assert isinstance(selector, Density)
    model.eval()
    if recipe.channels_last:
        model.to(memory_format=torch.channels_last)
    _, layer = find_layer(model, recipe.cut)
    found: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Tensor) -> None:
        axis = selector.channel_dim
        axis = find_channel_dim(layer, output.shape) if axis is None else axis
        found.append(functional.represent(output, selector.dim, axis))

    samples = min(SAMPLES, len(train))
    ids = torch.linspace(0, len(train) - 1, samples, dtype=torch.float64).round().long().unique()
    plan = [(part, seed_of(0, i)) for i, part in enumerate(ids.split(min(_BATCH, recipe.evaluation_batch)))]
    handle = layer.register_forward_hook(keep)
    try:
        # A model may draw numbers even in eval mode.
        with torch.random.fork_rng([]), Bar(len(ids), "samples near the centroids", "sample", leave=False) as bar:
            for x, _, part in train.batches(plan):
                if recipe.channels_last:
                    x = x.to(memory_format=torch.channels_last)
                with tasks.autocast(recipe, torch.device("cpu")):
                    model(x)
                bar.update(len(part))
    finally:
        handle.remove()
    return torch.cat(found), ids
