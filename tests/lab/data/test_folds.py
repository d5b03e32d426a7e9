"""Folds of the training images: a partition, with its share of every class in each, and copies together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchvision")
pytest.importorskip("scipy")

from PIL import Image

from halfway.lab.data import DataSettings, load
from halfway.lab.data.folds import assign, copies, folds_of
from halfway.lab.data.sources import Arrays
from tests.helpers.pictures import few, generator


def noise(count: int) -> Tensor:
    return torch.randint(0, 256, (count, 3, 4, 4), generator=generator(0), dtype=torch.uint8)


def counts(folds: Tensor, labels: Sequence[int], count: int) -> list[list[int]]:
    """Of each fold in each class, counted one by one."""
    found = Counter(zip(folds.tolist(), labels, strict=True))
    return [[found[fold, label] for label in sorted(set(labels))] for fold in range(count)]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_folds_have_the_same_share_of_every_class_within_one_sample(count: int) -> None:
    labels = [0] * 31 + [1] * 7 + [2] * 2 + [3] * 50
    folds = assign(labels, range(len(labels)), count)
    per_class = torch.tensor(counts(folds, labels, count))
    assert per_class.sum() == len(labels)
    assert (per_class.max(0).values - per_class.min(0).values).max() <= 1
    sizes = per_class.sum(1)
    assert sizes.max() - sizes.min() <= 1


def test_folds_are_drawn_and_do_not_follow_the_order_of_the_samples() -> None:
    folds = assign([0] * 200, range(200), 2)
    assert 30 < folds[:100].sum() < 70
    assert 30 < folds[::2].sum() < 70


def test_groups_stay_together_and_large_ones_are_balanced_by_small_ones() -> None:
    groups = [0] * 10 + [1] * 6 + list(range(2, 16))
    folds = assign([0] * 30, groups, 2)
    assert len(set(folds[:10].tolist())) == len(set(folds[10:16].tolist())) == 1
    assert folds.bincount().tolist() == [15, 15]


def test_a_large_group_does_not_upset_the_other_classes() -> None:
    labels = [0] * 10 + [1] * 10
    folds = assign(labels, [0] * 10 + list(range(1, 11)), 2)
    assert [fold[1] for fold in counts(folds, labels, 2)] == [5, 5]


def test_copies_are_found_by_pixels_and_not_by_labels() -> None:
    pixels = noise(6)
    pixels[3] = pixels[1]
    pixels[5] = pixels[1]
    same = copies(Arrays(pixels, torch.arange(6)))
    assert same[1] == same[3] == same[5]
    assert len(set(same)) == 4


def test_the_same_bytes_in_another_shape_are_no_copy() -> None:
    class Shapes(Arrays):
        def read(self, row: int) -> tuple[Image.Image, int]:
            return Image.new("RGB", (8, 2) if row else (4, 4)), 0

    assert len(set(copies(Shapes(noise(2), torch.zeros(2, dtype=torch.long))))) == 2


def test_copies_of_copies_are_together_by_their_originals() -> None:
    class Made(Arrays):
        originals = torch.tensor([0, 0, 1, 1, 2])

    pixels = noise(5)
    pixels[2] = pixels[1]
    same = copies(Made(pixels, torch.arange(5)))
    assert len(set(same[:4])) == 1
    assert same[4] != same[0]


def test_a_data_set_of_pairs_is_split_between_pairs() -> None:
    pixels = noise(40).repeat(2, 1, 1, 1)
    labels = torch.arange(40).remainder(4).repeat(2)
    folds = folds_of(Arrays(pixels, labels), 2)
    assert torch.equal(folds[:40], folds[40:])
    assert counts(folds, labels.tolist(), 2) == [[10] * 4, [10] * 4]


@pytest.mark.parametrize("settings", [few("cifar10"), few("imagefolder"), few("voc2012")])
def test_every_image_is_held_out_once_and_not_augmented(settings: DataSettings) -> None:
    whole = load(replace(settings, augment="none"), "synthetic").train
    seen: list[int] = []
    for k in range(3):
        part = load(replace(settings, fold=(k, 3)), "synthetic")
        assert part.held_out is not None
        ids = part.held_out.ids
        seen += ids.tolist()
        assert part.held_out.of == len(whole) == len(part.train) + len(ids)
        assert f"data.fold=[{k}, 3] is left out" in part.description
        ((x, y, _),) = part.held_out.images.batches([(torch.arange(len(ids)), 7)])
        ((x_whole, y_whole, _),) = whole.batches([(ids, 7)])
        assert torch.equal(x, x_whole)
        assert torch.equal(y, y_whole)
        others = {whole.picture(i).numpy().tobytes() for i in range(len(whole)) if i not in ids}
        assert {part.train.picture(i).numpy().tobytes() for i in range(len(part.train))} == others
    assert sorted(seen) == list(range(len(whole)))


@pytest.mark.parametrize("fold", [(0, 1), (2, 2), (-1, 2)])
def test_a_fold_that_there_is_not_is_refused(fold: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="leaves out fold k of K"):
        load(replace(few("cifar10"), fold=fold), "synthetic")


def test_a_fold_needs_images_and_no_holdout() -> None:
    with pytest.raises(ValueError, match="3 different training images cannot be split into 5 folds; take fewer"):
        assign([0, 0, 0, 0], [0, 1, 2, 2], 5)
    with pytest.raises(ValueError, match=r"data\.fold .* data\.holdout .*: set one of them"):
        load(replace(few("cifar10"), fold=(0, 2), holdout=True), "synthetic")
