"""What differs between classification and segmentation: the loss, and the score.

A score is a percentage, larger is better, computed by torchmetrics over all ranks: top-1 accuracy, or the mean
intersection over union of the classes, where pixels of 255 do not count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ...advice.trial import SMALL_LOSS
from ...selectors.tools.losses import LossFunction
from ..data import IGNORE, TestSet
from ..progress import Bar
from ..recipes.schema import Recipe
from .rank import rank_and_size


@dataclass(frozen=True)
class Scored:
    """What an evaluation found.

    score: in percent.
    loss: the mean plain loss of an image; None where scales are averaged.
    small: the share of images whose plain loss is below `SMALL_LOSS`; None where there is no loss.
    """

    score: float
    loss: float | None
    small: float | None


class Task:
    """How to train and score a recipe's model."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def loss(self, outputs: Any, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """A scalar: the mean over the samples (and pixels) of the batch, each times its weight (B,)."""
        raise NotImplementedError

    def losses(self, outputs: Any, y: Tensor, plain: bool = False) -> Tensor:
        """(B,) the loss of each sample, for methods that score by it; in segmentation the mean over an image's pixels.

        plain: without label smoothing.
        """
        raise NotImplementedError

    def plain_losses(self, outputs: Any, y: Tensor) -> Tensor:
        """(B,) without label smoothing."""
        return self.losses(outputs, y, plain=True)

    def loss_for(self, recipe: Recipe) -> LossFunction:
        """What the recipe's method scores by: the training loss, except where it is compared with irreducible losses,
        which are plain."""
        compared = recipe.pruning is not None and recipe.pruning.implementation == "rho"
        return self.plain_losses if compared else self.losses

    def metric(self) -> Any:
        """A new torchmetrics metric."""
        raise NotImplementedError

    def predict(
        self, model: nn.Module, x: Tensor, y: Tensor, scales: tuple[float, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Predicted classes, in the shape of `y`, and the plain loss of each image (B,); no loss at several scales."""
        raise NotImplementedError

    @property
    def smallest_batch(self) -> int:
        """The fewest samples that a training step of this task can have."""
        return 1

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, test: TestSet, device: torch.device, scales: tuple[float, ...] = (), limit: int = 0
    ) -> Scored:
        """The model on test images, by all ranks together.

        Args:
            scales: evaluate at each of these, flipped and not, and average; empty: once, at the original scale.
            limit: stop after this many batches; 0: all.
        """
        metric = self.metric().to(device)
        # Of each batch: sum of the losses, how many are small, of how many images. Read at the end: nothing waits.
        sums: list[Tensor] = []
        was_training = model.training
        model.eval()
        rank, ranks = rank_and_size()
        batch_size = self.recipe.evaluation_batch
        name = "multi-scale evaluation" if scales else "evaluation"
        try:
            with Bar(-(-len(test) // ranks), name, unit="image", show=rank == 0, leave=False, delay=5.0) as bar:
                for i, (x, y) in enumerate(test.batches(batch_size, rank, ranks)):
                    if limit and i == limit:
                        break
                    with autocast(self.recipe, device):
                        predicted, losses_B = self.predict(model, laid_out(x, self.recipe), y, scales)
                    metric.update(predicted, y)
                    if losses_B is not None:
                        small_B = (losses_B < SMALL_LOSS).float()
                        sums.append(
                            torch.stack([losses_B.float().sum(), small_B.sum(), torch.ones_like(small_B).sum()])
                        )
                    bar.update(len(x))
            score = 100 * float(metric.compute())
        finally:
            model.train(was_training)
        total_3 = torch.stack(sums).cpu().double().sum(0) if sums else torch.zeros(3, dtype=torch.float64)
        if ranks > 1:
            on_device = total_3.float().to(device)
            dist.all_reduce(on_device)
            total_3 = on_device.cpu()
        total, small, images = total_3.tolist()
        return Scored(score, total / images, small / images) if images else Scored(score, None, None)


class Classification(Task):
    def loss(self, outputs: Any, y: Tensor, weights: Tensor | None = None) -> Tensor:
        if weights is not None:
            return (weights * self.losses(outputs, y)).mean()
        return F.cross_entropy(outputs, y, label_smoothing=self.recipe.label_smoothing)

    def losses(self, outputs: Any, y: Tensor, plain: bool = False) -> Tensor:
        smoothing = 0.0 if plain else self.recipe.label_smoothing
        return F.cross_entropy(outputs.float(), y, label_smoothing=smoothing, reduction="none")

    def metric(self) -> Any:
        from torchmetrics.classification import MulticlassAccuracy

        return MulticlassAccuracy(self.recipe.data.classes, average="micro")

    def predict(
        self, model: nn.Module, x: Tensor, y: Tensor, scales: tuple[float, ...]
    ) -> tuple[Tensor, Tensor | None]:
        logits = model(x)
        return logits.argmax(1), self.plain_losses(logits, y)


class Segmentation(Task):
    """Models return logits (B, C, H, W), or a mapping with "out" and, for an auxiliary head, "aux"."""

    def loss(self, outputs: Any, y: Tensor, weights: Tensor | None = None) -> Tensor:
        # Not `reduction="mean"`, which is 0/0 on a batch without a single labelled pixel.
        pixels = (y != IGNORE).sum().clamp(min=1)
        if weights is None:
            return self._both_heads(outputs, lambda logits: self._entropy(logits, y, "sum") / pixels)
        return self._both_heads(
            outputs, lambda logits: (weights * self._entropy(logits, y, "none").sum((1, 2))).sum() / pixels
        )

    def losses(self, outputs: Any, y: Tensor, plain: bool = False) -> Tensor:
        pixels = (y != IGNORE).sum((1, 2)).clamp(min=1)

        def of_head(logits: Tensor) -> Tensor:
            return self._entropy(logits.float(), y, "none", plain).sum((1, 2)) / pixels

        return self._both_heads(outputs, of_head)

    def _both_heads(self, outputs: Any, loss: Callable[[Tensor], Tensor]) -> Tensor:
        if isinstance(outputs, Tensor):
            return loss(outputs)
        if "aux" not in outputs:
            return loss(outputs["out"])
        return loss(outputs["out"]) + self.recipe.auxiliary_weight * loss(outputs["aux"])

    def _entropy(self, logits: Tensor, y: Tensor, reduction: str, plain: bool = False) -> Tensor:
        smoothing = 0.0 if plain else self.recipe.label_smoothing
        return F.cross_entropy(logits, y, ignore_index=IGNORE, label_smoothing=smoothing, reduction=reduction)

    def metric(self) -> Any:
        from torchmetrics.classification import MulticlassJaccardIndex

        return MulticlassJaccardIndex(self.recipe.data.classes, average="macro", ignore_index=IGNORE)

    def predict(
        self, model: nn.Module, x: Tensor, y: Tensor, scales: tuple[float, ...]
    ) -> tuple[Tensor, Tensor | None]:
        if not scales:
            logits = _resized(_out(model(x)), y.shape[-2:])
            return logits.argmax(1), self.plain_losses(logits, y)
        total = torch.zeros(len(x), self.recipe.data.classes, *y.shape[-2:], device=x.device)
        for scale in scales:
            size = [max(32, round(side * scale)) for side in x.shape[-2:]]
            scaled = _resized(x, size)
            for flipped in (False, True):
                logits = _out(model(scaled.flip(-1) if flipped else scaled))
                logits = logits.flip(-1) if flipped else logits
                total += _resized(logits.float(), y.shape[-2:]).softmax(1)
        return total.argmax(1), None

    @property
    def smallest_batch(self) -> int:
        # The image pooling of DeepLab's ASPP leaves one value per channel and image, and BatchNorm needs two values.
        return 2


def make(recipe: Recipe) -> Task:
    """The task of a recipe."""
    return {"classification": Classification, "segmentation": Segmentation}[recipe.task](recipe)


@contextlib.contextmanager
def autocast(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Mixed precision, if the recipe says so: float16 on CUDA, bfloat16 elsewhere."""
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    with torch.autocast(device.type, dtype, enabled=recipe.precision == "amp"):
        yield


def laid_out(x: Tensor, recipe: Recipe) -> Tensor:
    """A batch in the recipe's memory format."""
    return x.to(memory_format=torch.channels_last) if recipe.channels_last else x


def _out(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs["out"]


def _resized(x: Tensor, size: Any) -> Tensor:
    return x if x.shape[-2:] == torch.Size(size) else F.interpolate(x, list(size), mode="bilinear", align_corners=False)
