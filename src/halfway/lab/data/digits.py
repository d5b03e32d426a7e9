"""scikit-learn's handwritten digits: 1,797 pictures of 8 x 8 px that ship with it, so nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import torch

from .base import Colours
from .settings import DataSettings
from .sources import Arrays, DatasetSources

NAMES = [str(digit) for digit in range(10)]
# Mean and standard deviation of all pictures, enlarged to 16 px.
COLOURS = Colours((0.305, 0.305, 0.305), (0.319, 0.319, 0.319))
TRAIN_IMAGES = 1200


def digits(settings: DataSettings, root: Path) -> DatasetSources:
    """The same stratified split for every run; `root` is not used."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    labels = torch.from_numpy(data.target).long()
    grey = (torch.from_numpy(data.images) * (255 / 16)).round().to(torch.uint8)
    pixels = grey.unsqueeze(1).repeat(1, 3, 1, 1)
    rows = train_test_split(range(len(labels)), train_size=TRAIN_IMAGES, stratify=data.target, random_state=0)
    train, test = (Arrays(pixels[part], labels[part]) for part in rows)
    return DatasetSources("scikit-learn's digits", NAMES, train, test)
