"""Controls that prune nothing and cost less than full data: fewer steps, or smaller batches.

`shorter` trains on full data for 1 - p of the steps. Learning rate and warm-up are compressed, so that both end where
they should; the last epoch ends where the steps do. Whole epochs would be too coarse: one of 16 is 6 % of a run.

`smaller_batch` takes as many steps as full data, each on as many samples as random pruning retains, S of B. They are
drawn without replacement through the data, so that the run is S/B as many passes over it, and every pass sees every
sample once. That is random pruning without its one flaw, that some samples are skipped for long by chance. The learning
rate is the recipe's, or, as `smaller_batch_scaled`, S/B of it: which of the two suits smaller batches is not known.
"""

from __future__ import annotations

import dataclasses

from ...functional import retained_count
from .methods import SHORTER, SMALLER_BATCH, SMALLER_BATCH_SCALED
from .schema import OptimizerSettings, Recipe


def steps(recipe: Recipe, full: int) -> int:
    """The steps of a run, of which full data take `full`."""
    return max(1, round((1 - recipe.require_one_ratio(recipe.method)) * full)) if recipe.method == SHORTER else full


def batch_size(recipe: Recipe, ranks: int = 1) -> int:
    """Samples that a step draws, over all ranks."""
    if recipe.method not in (SMALLER_BATCH, SMALLER_BATCH_SCALED):
        return recipe.batch_size
    return retained_count(recipe.batch_size // ranks, recipe.require_one_ratio(recipe.method)) * ranks


def optimizer(recipe: Recipe, ranks: int = 1) -> OptimizerSettings:
    """The recipe's, with the learning rate that suits the batches if the method scales it."""
    if recipe.method != SMALLER_BATCH_SCALED:
        return recipe.optimizer
    share = batch_size(recipe, ranks) / recipe.batch_size
    return dataclasses.replace(recipe.optimizer, lr=recipe.optimizer.lr * share)
