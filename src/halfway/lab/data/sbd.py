"""The masks of the Semantic Boundaries Dataset (SBD) beside those of PASCAL VOC 2012: `data.split=trainaug`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ..files import write_whole
from ..progress import Bar
from . import download, segmentation

_DATASET = "benchmark_RELEASE/dataset"


def wanted(name: str) -> bool:
    """Whether a member of the archive is needed: class masks and lists are. Its images are VOC's."""
    return name.startswith(f"{_DATASET}/cls/") or name in (f"{_DATASET}/train.txt", f"{_DATASET}/val.txt")


def install(unpacked: Path, root: Path) -> None:
    """Write `SegmentationClassAug/` and `trainaug.txt` into the folder of VOC 2012.

    The split has all images of SBD and VOC's training images, except those that VOC validates on. Masks are VOC's own
    where they exist, else SBD's.
    """
    from PIL import Image

    voc, source, masks = segmentation.voc_folder(root), unpacked / _DATASET, unpacked / "SegmentationClassAug"
    assert voc is not None, "fetched first"
    for path in (source / "train.txt", source / "val.txt", source / "cls"):
        if not path.exists():
            raise ValueError(f"the archive has no {_DATASET}/{path.name}: it is not the official one")
    own = _names(segmentation.voc_list(voc, "train"))
    others = _names(source / "train.txt") | _names(source / "val.txt")
    names = sorted((own | others) - _names(segmentation.voc_list(voc, "val")))
    masks.mkdir()
    with Bar(len(names), "converting masks", " files", delay=1.0) as bar:
        for name in names:
            if name in own:
                shutil.copyfile(voc / "SegmentationClass" / f"{name}.png", masks / f"{name}.png")
            else:
                Image.fromarray(_mask(source / "cls" / f"{name}.mat")).save(masks / f"{name}.png")
            bar.update()
    # The list first: it says nothing without the folder, so that only the last step makes the split complete.
    write_whole(segmentation.voc_list(voc, "trainaug"), "\n".join(names) + "\n")
    download.move(masks, voc / masks.name)


def _names(path: Path) -> set[str]:
    return set(path.read_text().split())


def _mask(path: Path) -> Any:
    """(H, W) uint8 from a MATLAB file."""
    import numpy as np
    from scipy.io import loadmat

    return loadmat(path)["GTcls"][0]["Segmentation"][0].astype(np.uint8)
