"""What is measured of a run when a round ends: test images, and at the end also training images."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from ...seeds import seed_of
from ..data import Data
from ..recipes.schema import Recipe
from . import batch_norm, tasks
from .rank import rank_and_size


class Evaluation:
    """Scores the model of a run. It leaves no trace in the training.

    Args:
        recipe, data: of the run.
        task: its task.
        device: where the model is.
    """

    def __init__(self, recipe: Recipe, data: Data, task: tasks.Task, device: torch.device) -> None:
        self.recipe, self.data, self.task, self.device = recipe, data, task, device

    def __call__(self, model: nn.Module, last: bool) -> dict[str, float | None]:
        """Metrics by name. last: the training is over, so that what is measured once is measured."""
        found = self.task.evaluate(model, self.data.test, self.device)
        metrics = {"score": found.score, "test_loss": found.loss}
        if last and (scales := self.recipe.multi_scale):
            metrics["multi_scale"] = self.task.evaluate(model, self.data.test, self.device, scales).score
        if last and self.recipe.training_score:
            batches = -(-self.recipe.training_score // (self.recipe.evaluation_batch * rank_and_size()[1]))
            seen = self.task.evaluate(model, self.data.trained_on, self.device, limit=batches)
            metrics |= {"training_score": seen.score, "training_loss": seen.loss, "training_small_losses": seen.small}
        return metrics

    @contextlib.contextmanager
    def statistics(self, model: nn.Module) -> Iterator[None]:
        """BatchNorm's statistics for an evaluation, if the recipe wants others than those of the training."""
        seed, count = self.recipe.seed, self.recipe.batch_norm_samples
        if not count:
            yield
            return
        # Augmented training images, the same for all methods of a seed.
        ids = torch.randperm(len(self.data.train), generator=torch.Generator().manual_seed(seed_of(seed)))[:count]
        plan = [(part, seed_of(seed, i)) for i, part in enumerate(ids.split(self.recipe.evaluation_batch))]
        batches = (tasks.laid_out(x, self.recipe) for x, _, _ in self.data.train.batches(plan))
        with tasks.autocast(self.recipe, self.device), batch_norm.estimated(model, batches):
            yield
