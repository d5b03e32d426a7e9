"""Validation images: set aside from the training images, the same ones whatever else is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchvision")
pytest.importorskip("tqdm")

from halfway.lab.data import Data, load
from tests.helpers.pictures import settings
from tests.lab.data.test_cifar import binary_release


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    binary_release(tmp_path, monkeypatch, each=20)
    return tmp_path


def pixels(data: Data) -> list[bytes]:
    return [data.train.picture(i).numpy().tobytes() for i in range(len(data.train))]


def scored(data: Data) -> list[bytes]:
    """The images that score the model, normalised."""
    return [x.numpy().tobytes() for batch, _ in data.test.batches(50) for x in batch]


def trained(data: Data) -> list[bytes]:
    return [x.numpy().tobytes() for batch, _ in data.trained_on.batches(50) for x in batch]


def test_they_are_training_images_that_no_subset_trains_on(root: Path) -> None:
    everything = set(trained(load(settings(), root)))
    aside = load(settings(validation_samples=30, evaluate="validation"), root)
    assert len(everything) == 100
    assert set(scored(aside)) | set(trained(aside)) == everything
    assert (len(aside.test), len(aside.train)) == (30, 70)
    assert aside.description.endswith("70 of 100 training images, 30 validation images")
    held = scored(aside)
    subsets = []
    for count in (10, 25, 70):
        data = load(settings(validation_samples=30, evaluate="validation", train_samples=count), root)
        assert scored(data) == held, "the same for every train_samples"
        assert not set(trained(data)) & set(held)
        subsets.append(set(trained(data)))
    assert subsets[0] < subsets[1] < subsets[2], "a smaller subset is part of every larger one"


def test_what_is_scored_does_not_change_what_is_trained_on(root: Path) -> None:
    tested, validated = (
        load(settings(validation_samples=30, train_samples=40, evaluate=name), root) for name in ("test", "validation")
    )
    assert pixels(tested) == pixels(validated)
    assert scored(tested) == scored(load(settings(), root))
    assert tested.description.endswith("40 of 100 training images, 20 test images")


def test_a_part_of_them_can_be_scored(root: Path) -> None:
    some, all_of_them = (
        load(settings(validation_samples=30, evaluate="validation", test_samples=n), root) for n in (8, None)
    )
    assert len(some.test) == 8
    assert set(scored(some)) < set(scored(all_of_them))


def test_none_are_set_aside_unless_asked_for(root: Path) -> None:
    assert [len(load(settings(validation_samples=n), root).train) for n in (0, None)] == [100, 100]


def test_there_are_synthetic_ones() -> None:
    data = load(settings(validation_samples=30, train_samples=50, evaluate="validation"), "synthetic")
    assert (len(data.train), len(data.test)) == (50, 30)
    assert not set(trained(data)) & set(scored(data))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"validation_samples": 100}, "there are 100 training images: choose 1 to 99"),
        ({"validation_samples": -1}, "choose 1 to 99"),
        ({"evaluate": "validation"}, "set data.validation_samples=5000, say"),
        ({"validation_samples": 30, "train_samples": 71}, "there are 70 training images: choose 1 to 70"),
    ],
)
def test_what_cannot_be_had_is_refused(root: Path, given: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(settings(**given), root)
