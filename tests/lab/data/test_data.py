"""`halfway.lab.data`: the same batches whenever and wherever they are made, masks that follow their images, and errors
that say what to do. No data set is needed: official layouts are written in small."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("tqdm")

import numpy as np
from PIL import Image

from halfway.lab.data import SETS, DataSettings, load, synthetic
from halfway.lab.data import segmentation as seg
from tests.helpers.pictures import PURE, agree, class_folders, few, generator, mask_folder, plan, same, save, settings

# The same batches, whenever and wherever they are made --------------------------------------------------------------

KINDS = {
    "cifar": few("cifar10"),
    "images in memory": few("imagefolder", memory=True),
    "images": few("imagefolder", augment="resized-crop"),
    "autoaugment": few("imagefolder", augment="autoaugment"),
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


@pytest.mark.parametrize("kind", ["cifar", "images", "images in memory", "masks"])
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
    source = synthetic.SyntheticPictures("segmentation", 21, 20, (64, 64))
    masks = [source.read(i)[1] for i in range(20)]
    assert all({0, 255} <= set(np.unique(m).tolist()) for m in masks)
    assert len({c for m in masks for c in np.unique(m).tolist()}) > 15


ERRORS = {
    "unknown set": (DataSettings("cifar", 10, (32, 32)), "did you mean cifar10"),
    "classes": (settings(classes=7), "10 classes, the recipe says 7: set data.classes=10"),
    "policy": (settings(augment="zoom"), "choose from none, .*crop-flip, shift-flip, resized-crop, autoaugment"),
    "policy of another task": (settings("voc2012", augment="crop-flip"), "choose from none, segmentation"),
    "policy in memory": (
        settings(augment="autoaugment"),
        "CIFAR-10 always stays there, so set data.augment=none or .*crop-flip",
    ),
    "crops in memory": (
        few("imagefolder", augment="resized-crop", memory=True),
        r"'resized-crop' does not work .* in memory: set data\.memory=false or data\.augment=none or .*crop-flip",
    ),
    "masks in memory": (
        few("voc2012", augment="segmentation", memory=True),
        r"'segmentation' does not work on images in memory: set data\.memory=false or data\.augment=none\. ",
    ),
    "split": (settings(split="trainaug"), "choose from train"),
    "size": (settings(size=(0, 32)), "must be positive"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_names_the_fix(case: str) -> None:
    wrong, says = ERRORS[case]
    with pytest.raises(ValueError, match=says):
        load(wrong, "synthetic")


def test_a_run_folder_with_a_policy_that_is_gone_does_not_go_on_with_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("yaml")
    from halfway.lab.cli import main
    from halfway.lab.recipes import reading

    recipe = reading.load("tiny-imagenet-resnet50").with_settings({"root": "synthetic", "data.memory": True})
    config = tmp_path / "config.yaml"
    config.write_text(reading.dump(recipe))
    before = config.read_bytes()
    assert main(["train", str(config), "--resume", "--out", str(tmp_path)]) == 2
    assert "halfway 0.1.0 had another policy under this name" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]
    assert config.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cifar10", r"halfway data cifar10 --to .*cifar-10-binary\.tar\.gz.*data_batch_1\.bin"),
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
