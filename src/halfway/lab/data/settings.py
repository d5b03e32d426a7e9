"""What a recipe says about its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Settings of `variants`: at their defaults nothing is changed.
VARIANTS = ("wrong_labels", "imbalance", "copies")


@dataclass(frozen=True)
class DataSettings:
    """The `data` section of a recipe.

    name: a data set of `halfway.lab.data.SETS`.
    classes: how many there are; checked against what is found on disk.
    size: height and width of the images the model trains on.
    augment: a policy of `halfway.lab.data.augment`: "none", "crop" (pad, crop), "crop-flip" (the same, and flip),
        "shift-flip" (half as far, mirrored at the edges, and flip), "resized-crop" (ImageNet's), "autoaugment" (the
        same, then AutoAugment), "segmentation" (scale, crop, flip, colours).
    train_samples, test_samples: a fixed random subset of that many, the same for every seed; None: all. A smaller
        subset of the training images is part of every larger one.
    validation_samples: set that many training images aside, the same ones for every seed and `train_samples`. They are
        never trained on.
    evaluate: which images score the model: "test", or "validation" while settings are still being chosen.
    wrong_labels: this share of the training labels is replaced by another class. Like the next two, the same images
        for every seed, see `variants`; validation and test images keep their labels.
    imbalance: the first class has that many times more training images than the last one, those between follow an
        exponential; `train_samples` is the total.
    copies: each of `train_samples / copies` images occurs that often, as near-copies of different pixels.
    holdout: train on as many of the images that `train_samples` leaves out, for a model whose losses show what can be
        learned of the others (`halfway train --save-losses`).
    fold: [k, K]: train on all but fold k of K, and score what is left out (`halfway irreducible`).
    split: of the training images, where a data set has several (VOC: train, trainaug).
    memory: decode everything once, keep it on the device, and augment whole batches there; for `augment` "none",
        "crop", "crop-flip" and "shift-flip".
    workers: processes that decode images, where they do not stay in memory.
    """

    name: str
    classes: int
    size: tuple[int, int]
    augment: str = "none"
    train_samples: int | None = None
    test_samples: int | None = None
    validation_samples: int | None = None
    evaluate: Literal["test", "validation"] = "test"
    wrong_labels: float = 0.0
    imbalance: float | None = None
    copies: int = 1
    holdout: bool = False
    fold: tuple[int, int] | None = None
    split: str = "train"
    memory: bool = False
    workers: int = 8
