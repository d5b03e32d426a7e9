"""CIFAR in its official layouts, written in small: both releases, and what is damaged."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("torchvision")
pytest.importorskip("tqdm")

import numpy as np

from halfway.lab.data import cifar, load, memory
from tests.helpers.pictures import generator, settings


def binary_release(root: Path, patch: pytest.MonkeyPatch, each: int = 8) -> tuple[Tensor, Tensor]:
    """A small CIFAR-10 in its official layout, whose sums are the official ones from now on; returns what is in it."""
    folder, sums, pixels, labels = root / "cifar-10-batches-bin", {}, [], []
    folder.mkdir(parents=True)
    for i, name in enumerate(cifar.SUMS_10):
        p = torch.randint(0, 256, (each, 3, 32, 32), dtype=torch.uint8, generator=generator(i))
        y = torch.randint(0, 10, (each,), generator=generator(i))
        data = torch.cat((y.byte()[:, None], p.flatten(1)), 1).numpy().tobytes()
        (folder / name).write_bytes(data)
        sums[name] = hashlib.sha1(data).hexdigest()
        pixels.append(p)
        labels.append(y)
    patch.setattr(cifar, "SUMS_10", sums)
    return torch.cat(pixels), torch.cat(labels)


@pytest.mark.parametrize("inside", [False, True], ids=["root", "the folder itself"])
def test_cifar10_reads_the_binary_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool) -> None:
    pixels, labels = binary_release(tmp_path, monkeypatch)
    root = tmp_path / "cifar-10-batches-bin" if inside else tmp_path
    data = load(settings(augment="none"), root)
    assert data.description == "CIFAR-10, binary release: 40 training images, 8 test images"
    assert data.classes[3] == "cat"
    ((x, y, ids),) = data.train.batches([(torch.arange(40), 0)])
    assert torch.equal(y, labels[:40])
    assert torch.equal(ids, torch.arange(40))
    for id in range(40):
        assert torch.equal(data.train.picture(id), pixels[id].permute(1, 2, 0))
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (cifar.COLOURS_10.mean, cifar.COLOURS_10.std))
    torch.testing.assert_close(x, (pixels[:40] / 255 - mean) / std)
    ((_, y),) = data.test.batches(100)
    assert torch.equal(y, labels[40:])


def test_cifar100_takes_the_fine_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cifar-100-binary").mkdir()
    data = bytes([19, 11]) + bytes(3072) + bytes([3, 99]) + bytes([255]) * 3072
    for name in cifar.SUMS_100:
        (tmp_path / "cifar-100-binary" / name).write_bytes(data)
    monkeypatch.setattr(cifar, "SUMS_100", dict.fromkeys(cifar.SUMS_100, hashlib.sha1(data).hexdigest()))
    train = load(settings("cifar100"), tmp_path).train
    assert [train.label(i) for i in range(2)] == ["boy", "worm"]
    assert train.picture(0).max() == 0
    assert train.picture(1).min() == 255


def test_records_are_a_label_then_red_green_and_blue() -> None:
    pixels, labels = cifar.records(bytes([7]) + bytes([1]) * 1024 + bytes([2]) * 1024 + bytes([3]) * 1024, 1)
    assert labels.tolist() == [7]
    assert pixels.shape == (1, 3, 32, 32)
    assert [int(c.unique()) for c in pixels[0]] == [1, 2, 3]


def test_a_corrupt_binary_file_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary_release(tmp_path, monkeypatch)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with pytest.raises(ValueError, match=r"data_batch_3\.bin is not the official file.*unpack again"):
        load(settings(), tmp_path)


def python_release(root: Path, patch: pytest.MonkeyPatch) -> None:
    """A small CIFAR-10 of pickles, whose sums torchvision believes in from now on."""
    from torchvision.datasets import CIFAR10

    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)

    def write(name: str, content: dict[str, Any]) -> list[str]:
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        return [name, hashlib.md5(data).hexdigest()]

    def batch(i: int) -> dict[str, Any]:
        return {"data": np.full((2, 3072), i, np.uint8), "labels": [i, 9 - i]}

    patch.setattr(CIFAR10, "train_list", [write(f"data_batch_{i}", batch(i)) for i in range(1, 6)])
    patch.setattr(CIFAR10, "test_list", [write("test_batch", batch(0))])
    name, md5 = write("batches.meta", {"label_names": cifar.NAMES_10})
    patch.setattr(CIFAR10, "meta", {"filename": name, "key": "label_names", "md5": md5})


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-py"])
def test_cifar10_reads_the_python_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str) -> None:
    python_release(tmp_path, monkeypatch)
    data = load(settings(), tmp_path / inside)
    assert data.description == "CIFAR-10, Python release: 10 training images, 2 test images"
    assert [data.train.label(i) for i in (0, 1)] == ["automobile", "ship"]
    assert data.train.picture(8).unique().tolist() == [5]


def test_a_corrupt_pickle_is_refused_by_name_before_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python_release(tmp_path, monkeypatch)
    (tmp_path / "cifar-10-batches-py" / "data_batch_2").write_bytes(b"no pickle")
    with pytest.raises(ValueError, match=r"data_batch_2 is missing or not the official file.*cifar-10-python\.tar\.gz"):
        load(settings(), tmp_path)


def test_cifar_is_averaged_down_to_a_smaller_size() -> None:
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    small = memory.resize(pixels, (16, 16))
    assert torch.equal(small, F.avg_pool2d(pixels.float(), 2).round().byte())
    assert memory.resize(pixels, (32, 32)) is pixels
