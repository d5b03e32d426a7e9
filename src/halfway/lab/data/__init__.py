"""Data sets by name, behind one interface, in memory or from disk.

A new data set is a function `(settings, root) -> DatasetSources` and a line in `SETS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import did_you_mean
from . import augment, cifar, digits, fashion, folders, folds, segmentation, synthetic, variants
from .base import IGNORE, IMAGENET, Colours, Data, HeldOut, TestSet, TrainSet
from .disk import DiskTestSet, DiskTrainSet
from .memory import MemoryTestSet, MemoryTrainSet, decode
from .settings import DataSettings
from .sources import DatasetSources, Source

__all__ = [
    "IGNORE",
    "SETS",
    "Colours",
    "Data",
    "DataSet",
    "DataSettings",
    "DatasetSources",
    "HeldOut",
    "Source",
    "TestSet",
    "TrainSet",
    "load",
]

# Not the run's seed: runs with different seeds must see the same images.
_SUBSET_SEED = 20_240_607


@dataclass(frozen=True)
class DataSet:
    """An entry of `SETS`.

    title: for people to read.
    task: "classification" or "segmentation".
    find: reads or lists the images in a folder.
    names: of the classes, where they are always the same.
    colours: mean and standard deviation to normalise with.
    small: always kept in memory, whatever the recipe says.
    splits: of the training images.
    """

    title: str
    task: str
    find: Callable[[DataSettings, Path], DatasetSources]
    names: list[str] | None = None
    colours: Colours = IMAGENET
    small: bool = False
    splits: tuple[str, ...] = ("train",)


SETS = {
    "cifar10": DataSet("CIFAR-10", "classification", cifar.cifar10, cifar.NAMES_10, cifar.COLOURS_10, small=True),
    "cifar100": DataSet("CIFAR-100", "classification", cifar.cifar100, cifar.NAMES_100, cifar.COLOURS_100, small=True),
    "digits": DataSet("digits", "classification", digits.digits, digits.NAMES, digits.COLOURS, small=True),
    "fashion-mnist": DataSet(
        "Fashion-MNIST", "classification", fashion.fashion_mnist, fashion.NAMES, fashion.COLOURS, small=True
    ),
    "imagefolder": DataSet("a folder of images", "classification", folders.imagefolder),
    "voc2012": DataSet(
        "PASCAL VOC 2012", "segmentation", segmentation.voc2012, segmentation.VOC_NAMES, splits=("train", "trainaug")
    ),
    "cityscapes": DataSet("Cityscapes", "segmentation", segmentation.cityscapes, segmentation.CITYSCAPES_NAMES),
    "segmentation-folder": DataSet("a folder of images and masks", "segmentation", segmentation.segmentation_folder),
}


def load(settings: DataSettings, root: str | Path, device: torch.device | str = "cpu") -> Data:
    """The data set that the settings describe.

    Args:
        settings: which one, and how to train on it.
        root: its folder; "synthetic" for generated pictures of the same classes and sizes, without files.
        device: where batches come out, and where the data set stays if it is kept in memory.
    """
    kind = _kind(settings)
    device = torch.device(device)
    memory = kind.small or settings.memory
    _policy(settings.augment, kind, memory)  # complains before anything is read
    invented = root == "synthetic"
    found = _synthetic(settings, kind) if invented else kind.find(settings, Path(root).expanduser())
    _check_classes(found, settings)
    rest, validation = _set_aside(found.train, settings.validation_samples)
    scored = found.test if settings.evaluate == "test" else validation
    chosen = _chosen(rest, settings, found.classes, invented)
    train, changes = variants.apply(chosen, settings, len(found.classes))
    # Of invented images there are as many as were asked for.
    test = scored if invented else _subset(scored, settings.test_samples, "test_samples", settings.evaluate)
    colours, size, workers = kind.colours, settings.size, settings.workers

    def training(source: Source, augmentation: str) -> tuple[TrainSet, TestSet]:
        """The images to train on, and the same as they are."""
        policy = _policy(augmentation, kind, memory)
        if not memory:
            loaded = DiskTrainSet(source, found.classes, colours, policy(size, colours.fill), workers, device)
            return loaded, DiskTestSet(source, colours, size, workers, device)
        pixels, targets = (
            part.to(device) for part in decode(source, size, colours, workers, "reading training images")
        )
        return (
            MemoryTrainSet(pixels, targets, found.classes, colours, policy, device),
            MemoryTestSet(pixels, targets, colours, device),
        )

    held_out, left_out = None, ""
    if settings.fold is not None:
        k, count = settings.fold
        fold_N = folds.folds_of(train, count, workers)
        others, ids = ((fold_N == k).eq(mine).nonzero().flatten() for mine in (False, True))
        held_out = HeldOut(training(train.take(ids.tolist()), "none")[0], ids, len(train))
        train = train.take(others.tolist())
        left_out = f" (data.fold=[{k}, {count}] is left out)"
    # Of copies, "10,000 of 50,000" would say something else.
    trained = _share(train, train if settings.copies > 1 else found.train, "training")
    pictures = f"{trained}{changes}{left_out}, {_share(test, scored, settings.evaluate)}"
    if memory:
        tests: TestSet = MemoryTestSet(*decode(test, size, colours, workers, "reading test images"), colours, device)
    else:
        tests = DiskTestSet(test, colours, size, workers, device)
    trains, trained_on = training(train, settings.augment)
    images = "" if chosen.labels is None else chosen.digest()
    return Data(found.classes, trains, tests, trained_on, f"{found.title}: {pictures}", held_out, images)


def _kind(settings: DataSettings) -> DataSet:
    if settings.name not in SETS:
        raise ValueError(f"no data set {settings.name!r}; {did_you_mean(settings.name, SETS)}")
    kind = SETS[settings.name]
    if settings.split not in kind.splits:
        raise ValueError(f"{kind.title} has no data.split={settings.split!r}: choose from {', '.join(kind.splits)}")
    if settings.fold is not None:
        folds.check(settings.fold)
        if settings.holdout:
            raise ValueError("data.fold leaves out training images and data.holdout trains on others: set one of them")
    variants.check(settings, kind.task, kind.title)
    if settings.evaluate == "validation" and not settings.validation_samples:
        raise ValueError("data.evaluate=validation needs images to evaluate on: set data.validation_samples=5000, say")
    if min(settings.size) < 1 or settings.classes < 1 or settings.workers < 0:
        raise ValueError(
            f"data.size and data.classes must be positive and data.workers not negative, got {settings.size}, "
            f"{settings.classes} and {settings.workers}"
        )
    return kind


def _policy(name: str, kind: DataSet, memory: bool) -> Any:
    """The augmentation, in the form for batches in memory or for pictures from disk."""
    if not memory:
        return augment.policy(name, kind.task).sample
    fix = f"{kind.title} always stays there, so set " if kind.small else "set data.memory=false or "
    return augment.batch_form(name, kind.task, fix)


def _synthetic(settings: DataSettings, kind: DataSet) -> DatasetSources:
    """As many pictures as the settings ask for, and few if they ask for all."""
    training, tests = synthetic.COUNTS[kind.task]
    names = kind.names or [f"class {i}" for i in range(settings.classes)]
    aside = settings.validation_samples or 0
    counts = ((variants.different(settings) or training) + aside, settings.test_samples or tests)
    if settings.imbalance is not None and settings.train_samples is not None:  # enough of the first class
        counts = (len(names) * counts[0], counts[1])
    firsts = (sum(counts) if settings.holdout else 0, counts[0])
    train, test = (
        synthetic.SyntheticPictures(kind.task, len(names), count, settings.size, exact=kind.small, first=first)
        for count, first in zip(counts, firsts, strict=True)
    )
    return DatasetSources(f"synthetic pictures in place of {kind.title}", names, train, test)


def _check_classes(found: DatasetSources, settings: DataSettings) -> None:
    if len(found.classes) != settings.classes:
        raise ValueError(
            f"{found.title} has {len(found.classes)} classes, the recipe says {settings.classes}: set "
            f"data.classes={len(found.classes)}"
        )


def _set_aside(source: Source, count: int | None) -> tuple[Source, Source]:
    """The images that may be trained on, and `count` random ones that may not."""
    if not count:
        return source, source.take([])
    if not 0 < count < len(source):
        raise ValueError(
            f"data.validation_samples={count}, but there are {len(source):,} training images: choose 1 to "
            f"{len(source) - 1}"
        )
    order = _order(source)
    rest, aside = (rows.sort().values.tolist() for rows in (order[count:], order[:count]))
    return source.take(rest), source.take(aside)


def _chosen(rest: Source, settings: DataSettings, names: list[str], invented: bool) -> Source:
    """The different images that are trained on."""
    count = variants.different(settings)
    if settings.imbalance is not None:
        return variants.tailed(rest, count, settings.imbalance, names, _order(rest))
    if invented:  # as many as were asked for
        return rest
    setting = "train_samples" if settings.copies == 1 else f"train_samples/{settings.copies}"
    return _subset(rest, count, setting, "training", settings.holdout)


def _order(source: Source) -> Tensor:
    """(N,) all rows in random order. What begins with the same rows is part of what takes more of them."""
    return torch.randperm(len(source), generator=torch.Generator().manual_seed(_SUBSET_SEED))


def _subset(source: Source, count: int | None, setting: str, what: str, holdout: bool = False) -> Source:
    """A random part of the images; with `holdout` another part, disjoint from it."""
    if count is None:
        if holdout:
            raise ValueError("data.holdout trains on images that data.train_samples leaves out, but it is not set")
        return source
    if not 1 <= count <= len(source):
        raise ValueError(
            f"data.{setting}={count}, but there are {len(source):,} {what} images: choose 1 to {len(source)}"
        )
    order = _order(source)
    rows = order[count : 2 * count] if holdout else order[:count]
    if not len(rows):
        raise ValueError(f"data.{setting}={count} leaves no {what} images to hold out: choose fewer than {len(source)}")
    return source.take(rows.sort().values.tolist())


def _share(part: Source, whole: Source, what: str) -> str:
    of = f" of {len(whole):,}" if len(part) < len(whole) else ""
    return f"{len(part):,}{of} {what} images"
