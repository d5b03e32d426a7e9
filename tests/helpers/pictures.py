"""Small pictures, masks and folders of them, for the tests of `halfway.lab.data`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from halfway.lab.data import SETS, Data, DataSettings
from halfway.lab.data.base import IMAGENET, Colours

PURE = np.array([[128, 128, 128], [230, 30, 30], [30, 230, 30], [30, 30, 230]], np.uint8)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def settings(name: str = "cifar10", **changes: Any) -> DataSettings:
    """Settings that suit a data set, without workers."""
    kind = SETS[name]
    usual_policy = "crop-flip" if kind.task == "classification" else "segmentation"
    usual: dict[str, Any] = {
        "classes": len(kind.names or PURE),
        "size": (32, 32),
        "augment": "none" if changes.get("memory") and usual_policy == "segmentation" else usual_policy,
        "workers": 0,
    }
    return DataSettings(name, **{**usual, **changes})


def few(name: str, **changes: Any) -> DataSettings:
    """The same for a synthetic set that is drawn in no time."""
    return settings(name, **{"train_samples": 24, "test_samples": 11, **changes})


def plan(data: Data, batches: int = 4, batch_size: int = 6) -> list[tuple[Tensor, int]]:
    order = torch.randperm(len(data.train), generator=generator())
    return [(ids, 100 + i) for i, ids in enumerate(order.split(batch_size)[:batches])]


def same(one: Any, other: Any) -> bool:
    """Whether two lists of tuples of tensors are equal bit for bit."""
    return len(one) == len(other) and all(
        torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


def save(path: Path, pixels: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def pure_pair(random: Any, h: int, w: int, classes: int = 4) -> tuple[Any, Any]:
    """A picture (h, w, 3) whose colour says its class, and the mask (h, w): blocks of 16 px."""
    blocks = random.integers(0, classes, (-(-h // 16), -(-w // 16)))
    mask = blocks.repeat(16, 0).repeat(16, 1)[:h, :w].astype(np.uint8)
    return PURE[mask], mask


def class_folders(root: Path, train: int = 6, val: int = 3) -> Path:
    """Four classes, told apart by their colour, in pictures of different sizes."""
    random = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        for c, name in enumerate(("ash", "red", "green", "blue")):
            for i in range(count):
                h, w = random.integers(40, 70, 2)
                save(root / part / name / f"{i}.png", np.broadcast_to(PURE[c], (h, w, 3)).copy())
    return root


def mask_folder(root: Path, train: int = 6, val: int = 4) -> Path:
    random = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        for i in range(count):
            pixels, mask = pure_pair(random, *random.integers(40, 90, 2))
            save(root / part / "images" / f"{i}.png", pixels)
            save(root / part / "masks" / f"{i}.png", mask)
    return root


def agree(x: Tensor, y: Tensor, colours: Colours = IMAGENET) -> int:
    """Check that the strongest colour of pixels is their class, away from edges; how many pixels that were."""
    pixels = x * torch.tensor(colours.std).view(1, 3, 1, 1) + torch.tensor(colours.mean).view(1, 3, 1, 1)
    padded = F.pad(y.float().unsqueeze(1), (2, 2, 2, 2), value=-1)  # what lies beyond the crop is unknown
    inner = (F.max_pool2d(padded, 5, 1) == -F.max_pool2d(-padded, 5, 1)).squeeze(1)
    for c in (1, 2, 3):
        assert bool((pixels.argmax(1)[inner & (y == c)] == c - 1).all())
    return int((inner & (y > 0) & (y < 4)).sum())
