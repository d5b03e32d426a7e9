"""Fashion-MNIST in its official layout, written in small: packed or not, in each place, and what is damaged."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchvision")
pytest.importorskip("tqdm")

from halfway.lab.data import fashion, load
from tests.helpers.pictures import generator, settings

COUNTS = {"train": 30, "t10k": 12}


def release(folder: Path, patch: pytest.MonkeyPatch, packed: bool = True) -> dict[str, tuple[Tensor, Tensor]]:
    """Four idx files, whose sums are the official ones from now on; returns grey pictures and labels."""
    folder.mkdir(parents=True)
    sums, content = {}, {}
    for i, (part, count) in enumerate(COUNTS.items()):
        grey = torch.randint(0, 256, (count, 28, 28), generator=generator(i), dtype=torch.uint8)
        labels = torch.randint(0, 10, (count,), generator=generator(i), dtype=torch.uint8)
        sizes = {"images-idx3": (2051, count, 28, 28), "labels-idx1": (2049, count)}
        for (kind, header), values in zip(sizes.items(), (grey, labels), strict=True):
            name = f"{part}-{kind}-ubyte"
            data = b"".join(number.to_bytes(4, "big") for number in header) + values.numpy().tobytes()
            sums[name] = hashlib.sha1(data).hexdigest()
            (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(data) if packed else data)
        content[part] = grey, labels.long()
    assert sums.keys() == fashion.SUMS.keys()
    patch.setattr(fashion, "SUMS", sums)
    return content


@pytest.mark.parametrize("place", ["fashion-mnist", "FashionMNIST/raw", "."])
@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
def test_the_official_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, packed: bool) -> None:
    root = tmp_path / "data"
    content = release(root / place, monkeypatch, packed)
    data = load(settings("fashion-mnist", size=(28, 28), augment="none"), root)
    assert data.description == "Fashion-MNIST: 30 training images, 12 test images"
    assert data.classes[9] == "Ankle boot"
    grey, labels = content["train"]
    ((x, y, _),) = data.train.batches([(torch.arange(30), 0)])
    assert torch.equal(y, labels)
    torch.testing.assert_close(x, ((grey / 255 - 0.2860) / 0.3530).unsqueeze(1).expand(-1, 3, -1, -1))
    assert torch.equal(data.train.picture(7), grey[7].unsqueeze(2).expand(-1, -1, 3))
    ((_, y),) = data.test.batches(100)
    assert torch.equal(y, content["t10k"][1])


def test_a_damaged_or_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release(tmp_path / "fashion-mnist", monkeypatch)
    path = tmp_path / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(gzip.compress(gzip.decompress(whole)[:-1] + b"\x63"))
    with pytest.raises(ValueError, match=r"t10k-labels-idx1-ubyte\.gz is not the official file"):
        load(settings("fashion-mnist"), tmp_path)
    path.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match=r"t10k-labels-idx1-ubyte\.gz cannot be unpacked .*: get it again"):
        load(settings("fashion-mnist"), tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="t10k-labels-idx1-ubyte is missing: put all four files there"):
        load(settings("fashion-mnist"), tmp_path)


def test_without_files_it_says_where_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="apt install dataset-fashion-mnist") as error:
        load(settings("fashion-mnist"), tmp_path)
    assert f"go to {tmp_path}/fashion-mnist" in str(error.value)
