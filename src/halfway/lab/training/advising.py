"""A recipe for `halfway.advise`: its network, optimizer, batches and loss, and the command that follows the advice."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...advice.advice import Advice, advise
from ...advice.recommend import Recommendation
from ...advice.words import on_losses
from ..data import Data
from ..progress import Bar
from ..recipes.methods import FULL, SHORTER
from ..recipes.schema import Recipe
from . import tasks
from .loop import Training

_USUAL_RATIO = 0.5


class Batches:
    """The training batches of a recipe, of one epoch after the other."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._epoch = -1

    def __len__(self) -> int:
        return self._training.order.per_epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self._epoch += 1
        plan = self._training.order.epoch(self._epoch)
        for x, y, _ in self._training.data.train.batches(plan):
            yield tasks.laid_out(x, self._training.recipe), y


def ratio_of(recipe: Recipe) -> float:
    """The share of samples to ask about: the recipe's, or one half where that prunes nothing."""
    return recipe.mean_ratio or _USUAL_RATIO


def advise_on(recipe: Recipe, data: Data, device: torch.device, seconds: float, words: Sequence[str]) -> Advice:
    """Advice on a recipe, with the command that follows it as the line to paste.

    Args:
        seconds: as for `halfway.advise`.
        words: of the command line that describe the recipe.
    """
    training = Training(recipe.with_settings({"method": FULL}), data, device, show=False)
    batches = Batches(training)
    epochs = recipe.length if recipe.unit == "epoch" else max(1.0, recipe.length / len(batches))
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    with _Bars() as bars:
        advice = advise(
            training.model,
            batches,
            epochs=epochs,
            loss_fn=lambda outputs, y: training.task.loss(outputs, y),
            optimizer=training.optimizer,
            at=recipe.cut,
            prune_ratio=ratio_of(recipe),
            seconds=seconds,
            autocast=half if recipe.precision == "amp" else None,
            clip_norm=recipe.clip_norm,
            progress=bars,
        )
    notes = (*advice.notes, *on_losses(recipe.label_smoothing, classes=True))
    return dataclasses.replace(advice, lines=command(advice.recommendation, ratio_of(recipe), words), notes=notes)


def command(found: Recommendation, prune_ratio: float, words: Sequence[str]) -> str:
    """The training that the advice recommends; random pruning and methods without a window, as in the evidence."""
    if found.kind == "method":
        finding = found.findings[0]
        settings = [f"{finding.selector}.{key}={value}" for key, value in finding.settings.items()]
        chosen = ["--method", finding.selector, "--prune-ratio", f"{prune_ratio:g}", "window=[0, null]", *settings]
    else:
        method = SHORTER if found.kind == "fewer epochs" else "random_even"
        chosen = ["--method", method, "--prune-ratio", f"{prune_ratio:g}"]
    return shlex.join(["halfway", "train", *words, *chosen])


class _Bars:
    """A progress bar for each part of the trial, in percent."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._name, self._shown = "", 0

    def __call__(self, name: str, done: float) -> None:
        if name != self._name:
            self.close()
            self._bar, self._name, self._shown = Bar(100, name, "%", leave=False), name, 0
        percent = int(100 * done)
        if self._bar is not None and percent > self._shown:
            self._bar.update(percent - self._shown)
            self._shown = percent

    def close(self) -> None:
        if self._bar is not None:
            self._bar.__exit__()

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
