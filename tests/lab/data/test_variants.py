"""Wrong labels, tails and near-copies: exactly what was asked for, in the training images alone, the same each time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchvision")
pytest.importorskip("tqdm")

from halfway.lab.data import Data, DataSettings, TrainSet, load, variants
from halfway.lab.data.folds import folds_of
from halfway.lab.data.sources import Arrays
from halfway.lab.recipes import reading
from tests.helpers.pictures import class_folders, generator, settings
from tests.lab.data.test_cifar import binary_release


def release(tmp_path: Path, patch: pytest.MonkeyPatch, each: int = 60) -> Path:
    binary_release(tmp_path, patch, each)
    return tmp_path


def content(data: Data) -> tuple[Tensor, Tensor]:
    """Pictures and labels, not augmented."""
    x, y = zip(*data.trained_on.batches(1000), strict=True)
    return torch.cat(x), torch.cat(y)


def pixels(train: TrainSet) -> list[bytes]:
    return [train.picture(i).numpy().tobytes() for i in range(len(train))]


def arrays(count: int, classes: int = 4, side: int = 16) -> Arrays:
    return Arrays(
        torch.randint(0, 256, (count, 3, side, side), generator=generator(1), dtype=torch.uint8),
        torch.arange(count) % classes,
    )


# ------------------------------------------------------------------ wrong labels


@pytest.mark.parametrize(("share", "count"), [(0.2, 60), (0.333, 100), (1.0, 300)])
def test_exactly_that_share_of_the_labels_is_another_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, count: int
) -> None:
    root = release(tmp_path, monkeypatch)
    plain, noisy = (load(settings(wrong_labels=s), root) for s in (0.0, share))
    (x, right), (x_noisy, given) = content(plain), content(noisy)
    assert torch.equal(x, x_noisy)
    assert int((right != given).sum()) == count
    assert noisy.description.endswith(f"300 training images ({count} labels are wrong), 60 test images")
    ((_, y),), ((_, y_noisy),) = plain.test.batches(100), noisy.test.batches(100)
    assert torch.equal(y, y_noisy)


def test_wrong_labels_are_spread_evenly_over_the_other_classes() -> None:
    right = torch.arange(9000) % 3
    given, count = variants.with_wrong_labels(right, 0.5, 3)
    assert count == 4500
    found = Counter((int(r), int(g)) for r, g in zip(right, given, strict=True) if r != g)
    assert sorted(found) == [(r, g) for r in range(3) for g in range(3) if r != g]
    assert all(abs(n - 750) < 4 * 750**0.5 for n in found.values()), found


@pytest.mark.parametrize("in_memory", [False, True], ids=["disk", "memory"])
def test_pictures_in_folders_can_have_wrong_labels_too(tmp_path: Path, in_memory: bool) -> None:
    root = class_folders(tmp_path)
    plain, noisy = (load(settings("imagefolder", memory=in_memory, wrong_labels=s), root) for s in (0.0, 0.25))
    before, after = ([data.train.label(i) for i in range(24)] for data in (plain, noisy))
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 6
    assert pixels(plain.train) == pixels(noisy.train)
    ((_, y, _),) = noisy.train.batches([(torch.arange(24), 0)])
    assert [noisy.classes[i] for i in y] == after


# -------------------------------------------------------------------------- tail


@pytest.mark.parametrize(("total", "imbalance"), [(100, 10.0), (137, 4.0), (60, 1.0)])
def test_a_tail_is_exponential_and_has_the_total(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, imbalance: float
) -> None:
    data = load(settings(train_samples=total, imbalance=imbalance), release(tmp_path, monkeypatch, 200))
    counts = content(data)[1].bincount(minlength=10)
    weights = torch.tensor([imbalance ** (-c / 9) for c in range(10)], dtype=torch.float64)
    assert counts.sum() == total
    assert (counts - total * weights / weights.sum()).abs().max() < 1
    assert f"{counts[0]} of the first class, {counts[9]} of the last" in data.description
    assert len(data.test) == 200


def test_without_a_total_the_first_class_keeps_all() -> None:
    counts = variants.tail([80] * 5, None, 16.0, "abcde")
    assert counts == [80, 40, 20, 10, 5]


def test_a_smaller_tail_is_part_of_a_larger_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = release(tmp_path, monkeypatch, 200)
    small, large = (set(pixels(load(settings(train_samples=n, imbalance=5), root).train)) for n in (50, 150))
    assert small < large


def test_the_counts_of_the_shipped_tail_are_those_its_title_says() -> None:
    recipe = reading.load("ladder-c16-tailed")
    assert recipe.data.imbalance is not None
    counts = variants.tail([4000] * 10, recipe.data.train_samples, recipe.data.imbalance, "abcdefghij")
    assert f"{counts[0]:,} images down to {counts[-1]}" in recipe.title


def test_a_tail_that_cannot_be_had_names_one_that_can() -> None:
    with pytest.raises(
        ValueError, match=r"takes 40 images of 'b', but there are 20: set data.train_samples to at"
    ) as e:
        variants.tail([100, 20], 120, 2.0, ["a", "b"])
    most = int(str(e.value).split("at most ")[1].split()[0])
    assert variants.tail([100, 20], most, 2.0, ["a", "b"]) == [40, 20]
    with pytest.raises(ValueError, match="leaves no image of 'c': choose a smaller one, or more train_samples"):
        variants.tail([100] * 3, 20, 900.0, "abc")


# ------------------------------------------------------------------------ copies


def test_each_image_occurs_as_near_copies_of_different_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = release(tmp_path, monkeypatch)
    plain, copied = (load(settings(train_samples=n, copies=c), root) for n, c in ((50, 1), (200, 4)))
    (x, y), (x_copies, y_copies) = content(plain), content(copied)
    assert torch.equal(x_copies[:50], x), "the originals"
    assert torch.equal(y_copies, y.repeat(4))
    assert len(set(pixels(copied.train))) == 200
    assert copied.description.endswith(
        "200 training images (50 different ones, each 4 times as near-copies), 60 test images"
    )


def test_a_near_copy_is_nearer_to_its_original_than_to_anything_else() -> None:
    smooth = torch.nn.functional.interpolate(torch.rand(40, 3, 4, 4, generator=generator(0)), (32, 32), mode="bicubic")
    originals = (255 * smooth.clamp(0, 1)).byte()
    copies = torch.stack([variants.near_copy(p, seed) for seed, p in enumerate(originals)])
    distance = torch.cdist(copies.flatten(1).double(), originals.flatten(1).double())
    assert torch.equal(distance.argmin(1), torch.arange(40))
    assert len({c.numpy().tobytes() for c in copies} | {p.numpy().tobytes() for p in originals}) == 80


def test_a_near_copy_is_moved_lightened_and_noisy_by_a_little() -> None:
    edge = torch.zeros(3, 32, 32, dtype=torch.uint8)
    edge[:, 16:] = 200
    first_rows = set()
    for seed in range(200):
        made = variants.near_copy(edge, seed).double()
        assert torch.equal(made[0], made[2]), "grey stays grey"
        first = int((made[0].mean(1) > 100).nonzero()[0])
        first_rows.add(first)
        dark, light = made[0, : first - 1].mean(), made[0, first + 1 :].mean()
        assert 160 < light - dark < 230
        assert dark < 25
        assert 180 < light < 225
        assert 2 < made[0, first + 1 :].std() < 4
    assert first_rows == set(range(14, 19)), "up to a sixteenth of the side, either way"


def test_copies_stay_together_in_a_fold() -> None:
    source, _ = variants.apply(arrays(30), replace(settings(), train_samples=90, copies=3), 4)
    folds = folds_of(source, 3)
    assert folds.bincount().tolist() == [30, 30, 30]
    assert torch.equal(folds[:30], folds[30:60])
    assert torch.equal(folds[:30], folds[60:])
    later = source.take([0, 30, 1, 61])
    assert later.originals is not None
    assert later.originals.tolist() == [0, 0, 1, 1]


def test_copies_from_disk_are_those_from_memory() -> None:
    disk = variants.Varied(
        arrays(6), torch.arange(6).repeat(2), torch.zeros(12, dtype=torch.long), torch.arange(12) // 6
    )
    held = disk.in_memory()
    for row in range(12):
        assert disk.read(row)[0].tobytes() == held.read(row)[0].tobytes()
    part = disk.take([7, 1])
    assert part.read(0)[0].tobytes() == held.read(7)[0].tobytes()


# --------------------------------------------------------------------------- all

ALL: dict[str, Any] = {"train_samples": 120, "wrong_labels": 0.2, "imbalance": 3.0, "copies": 4}


def test_together_they_are_a_tail_of_copies_with_wrong_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = release(tmp_path, monkeypatch, 100)
    tail = load(settings(train_samples=30, imbalance=3.0), root)
    both = load(settings(**ALL), root)
    assert pixels(both.train)[:30] == pixels(tail.train)
    right, given = content(tail)[1].repeat(4), content(both)[1]
    assert int((right != given).sum()) == 24
    assert "each 4 times as near-copies; 24 labels are wrong)" in both.description


def test_validation_images_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = release(tmp_path, monkeypatch, 100)
    aside = {"validation_samples": 100, "evaluate": "validation"}
    plain, varied = (load(settings(**aside, **more), root) for more in ({}, ALL))
    for (x, y), (x_varied, y_varied) in zip(plain.test.batches(50), varied.test.batches(50), strict=True):
        assert torch.equal(x, x_varied)
        assert torch.equal(y, y_varied)
    held = set(pixels(load(settings(**aside), root).train))
    assert set(pixels(varied.train)[:30]) <= held


@pytest.mark.parametrize("root", ["synthetic", "folders"])
def test_they_are_the_same_each_time(tmp_path: Path, root: str) -> None:
    given = settings("imagefolder", memory=True, **{**ALL, "train_samples": 24, "validation_samples": 3})
    one, other = (load(given, "synthetic" if root == "synthetic" else class_folders(tmp_path, 10, 2)) for _ in range(2))
    assert pixels(one.train) == pixels(other.train)
    assert torch.equal(content(one)[1], content(other)[1])
    assert len(one.train) == 24


ERRORS: dict[str, tuple[DataSettings, str]] = {
    "share": (settings(wrong_labels=1.2), "share of the labels, from 0 to 1, got 1.2"),
    "imbalance": (settings(imbalance=0.5), "at least 1, got 0.5"),
    "copies": (settings(copies=0), "at least 1, got 0"),
    "no multiple": (settings(train_samples=10, copies=4), "needs a data.train_samples that is a multiple of 4, got 10"),
    "no number": (settings(copies=4), "a multiple of 4, got None"),
    "holdout": (settings(train_samples=8, copies=4, holdout=True), "data.holdout and data.copies exclude each other"),
    "masks": (settings("voc2012", wrong_labels=0.1), "PASCAL VOC 2012 has masks: leave it out"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_does_not_fit_is_refused_before_anything_is_read(case: str) -> None:
    given, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        load(given, "nowhere")
