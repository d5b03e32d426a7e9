"""Pictures in one folder per class: ImageNet, or a user's own."""

from __future__ import annotations

from pathlib import Path

import torch

from .settings import DataSettings
from .sources import DatasetSources, LabelledFiles, missing


def imagefolder(settings: DataSettings, root: Path) -> DatasetSources:
    """`root/train/<class>/*` and `root/val/<class>/*`, as torchvision's ImageFolder reads them."""
    from torchvision.datasets import ImageFolder

    for part in ("train", "val"):
        if not (root / part).is_dir():
            raise missing(
                f"{part}/",
                root,
                "A folder of images has a folder per class, in train/ and in val/, with JPEG or PNG files:\n"
                f"    {root}/train/<class>/*.jpg\n"
                f"    {root}/val/<class>/*.jpg\n"
                "ImageNet comes from https://image-net.org, after registration; `halfway data imagenet` has the steps.",
            )
    train, test = ImageFolder(str(root / "train")), ImageFolder(str(root / "val"))
    if train.classes != test.classes:
        different = sorted(set(train.classes) ^ set(test.classes))[:3]
        raise ValueError(
            f"train/ and val/ in {root} must have the same classes, but {', '.join(different)} is in one only"
        )
    sources = (
        LabelledFiles([Path(path) for path, _ in part.samples], torch.tensor(part.targets)) for part in (train, test)
    )
    return DatasetSources(f"images in {root.resolve().name}", train.classes, *sources)


def class_folders(root: Path) -> Path | None:
    """The root, if it holds folders of classes."""
    return root if all((root / part).is_dir() for part in ("train", "val")) else None
