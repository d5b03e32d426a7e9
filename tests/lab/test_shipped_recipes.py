"""The recipes that ship: the paper's settings as its appendix prints them, and their tiny twins."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")

from halfway.lab.recipes import reading
from halfway.lab.recipes import schema as recipes
from halfway.lab.recipes.reading import load
from tests.helpers.recipe_files import written

TWINS = {
    "cifar10-resnet18": "tiny-cifar10",
    "cifar100-resnet18": "tiny-cifar100",
    "imagenet-resnet50": "tiny-imagenet-resnet50",
    "imagenet-swin-t": "tiny-imagenet-swin-t",
    "voc2012-deeplabv3": "tiny-voc",
    "cityscapes-deeplabv3": "tiny-cityscapes",
}

# The appendix table "Detailed training settings", read off the paper column by column. OneCycle has no warm-up of its
# own on CIFAR ("-"). The stages are those modules' names in the models.
APPENDIX: dict[str, dict[str, Any]] = {
    "cifar10-resnet18": {
        "optimizer.name": "sgd",
        "optimizer.weight_decay": 0.0005,
        "batch_size": 128,
        "length": 200,
        "optimizer.lr": 0.10,
        "label_smoothing": 0.1,
        "learning_rate.name": "onecycle",
        "learning_rate.warmup": None,
        "density.noise": 0.01,
        "density.num_centroids": 64,
        "density.dim": 128,
        "cut": "layer1",
        "window": [5, 180],
    },
    "cifar100-resnet18": {
        "optimizer.name": "sgd",
        "optimizer.weight_decay": 0.0005,
        "batch_size": 128,
        "length": 200,
        "optimizer.lr": 0.05,
        "label_smoothing": 0.1,
        "learning_rate.name": "onecycle",
        "learning_rate.warmup": None,
        "density.noise": 0.01,
        "density.num_centroids": 64,
        "density.dim": 128,
        "cut": "layer1",
        "window": [5, 180],
    },
    "imagenet-resnet50": {
        "optimizer.name": "lars",
        "optimizer.weight_decay": 0.00005,
        "batch_size": 1024,
        "length": 90,
        "optimizer.lr": 6.4,
        "label_smoothing": 0.1,
        "learning_rate.name": "onecycle",
        "learning_rate.warmup": 5,
        "density.noise": 0.001,
        "density.num_centroids": 64,
        "density.dim": 128,
        "cut": "layer2",
        "window": [5, 80],
    },
    "imagenet-swin-t": {
        "optimizer.name": "adamw",
        "optimizer.weight_decay": 0.05,
        "batch_size": 1024,
        "length": 300,
        "optimizer.lr": 0.001,
        "label_smoothing": 0.1,
        "learning_rate.name": "cosine",
        "learning_rate.warmup": 20,
        "density.noise": 0.001,
        "density.num_centroids": 64,
        "density.dim": 128,
        "cut": "features.1",
        "window": [15, 265],
    },
    # Not in that table, but in "Details of Segmentation Experiments".
    "voc2012-deeplabv3": {"unit": "step", "length": 36000, "cut": "backbone.layer3", "data.split": "trainaug"},
    "cityscapes-deeplabv3": {"unit": "step", "length": 36000, "cut": "backbone.layer3", "data.split": "train"},
}

# Tables 1 (CIFAR), 2 and 3 (ImageNet; 0.4 on ResNet-50 is in Table 3 alone) and 4 (segmentation): the score on full
# data, PFB's by ratio, and the time it saves by ratio.
TABLES: dict[str, tuple[float, dict[float, float], dict[float, float]]] = {
    "cifar10-resnet18": (95.6, {0.3: 95.9, 0.5: 95.5, 0.7: 95.2}, {}),
    "cifar100-resnet18": (78.2, {0.3: 79.1, 0.5: 78.8, 0.7: 77.9}, {}),
    "imagenet-resnet50": (76.4, {0.3: 77.0, 0.4: 76.9, 0.5: 76.1, 0.7: 75.3}, {0.4: 0.332}),
    "imagenet-swin-t": (79.6, {0.3: 79.6, 0.4: 79.2, 0.5: 78.2}, {}),
    "voc2012-deeplabv3": (77.9, {0.7: 73.4}, {0.7: 0.567}),
    "cityscapes-deeplabv3": (80.4, {0.3: 79.8}, {0.3: 0.241}),
}

# Recipes of the same steps that differ in how often an image is seen, and their variants.
LADDERS = {name for name in reading.names() if name.startswith("ladder-")}
# They prune from the first step to the last: a window would be a second thing that differs.
NO_WINDOW = {*LADDERS, "speedrun-cifar10"}


def test_every_full_size_recipe_has_a_tiny_twin_and_the_others_are_known() -> None:
    assert reading.names() == sorted(["digits", "long-cifar10", *TWINS, *TWINS.values(), *NO_WINDOW])


@pytest.mark.parametrize("name", reading.names())
def test_a_shipped_recipe_is_the_same_after_writing_and_reading(name: str, tmp_path: Path) -> None:
    recipe = load(name)
    assert recipe.name == name
    assert recipes.from_dict(recipe.as_dict()) == recipe
    assert load(written(tmp_path / "config.yaml", reading.dump(recipe))) == recipe


@pytest.mark.parametrize("name", sorted(set(reading.names()) - NO_WINDOW))
def test_a_shipped_window_lies_within_the_run_and_leaves_out_its_ends(name: str) -> None:
    recipe = load(name)
    start, stop = recipe.window
    assert stop is not None
    assert 0 < start < stop < recipe.length
    assert recipe.method == "pfb"


@pytest.mark.parametrize("name", APPENDIX)
def test_full_size_recipes_have_the_values_of_the_paper_s_appendix(name: str) -> None:
    recipe = load(name)
    assert {key: recipe.get(key) for key in APPENDIX[name]} == APPENDIX[name]


def test_the_models_and_data_are_the_paper_s() -> None:
    expected = {
        "cifar10-resnet18": ("small_resnet", "cifar10", 10),
        "cifar100-resnet18": ("small_resnet", "cifar100", 100),
        "imagenet-resnet50": ("resnet50", "imagefolder", 1000),
        "imagenet-swin-t": ("swin_t", "imagefolder", 1000),
        "voc2012-deeplabv3": ("deeplabv3_resnet50", "voc2012", 21),
        "cityscapes-deeplabv3": ("deeplabv3_resnet50", "cityscapes", 19),
    }
    loaded = {name: load(name) for name in expected}
    assert {n: (r.model.name, r.data.name, r.data.classes) for n, r in loaded.items()} == expected
    # Of the four columns of the table, only Swin-T has AutoAugment and gradient clipping; only Table 3 mentions AMP.
    assert {n for n, r in loaded.items() if r.data.augment == "autoaugment"} == {"imagenet-swin-t"}
    assert {n for n, r in loaded.items() if r.clip_norm is not None} == {"imagenet-swin-t"}
    assert loaded["imagenet-resnet50"].precision == "amp"
    assert {n for n, r in loaded.items() if r.multi_scale} == {"voc2012-deeplabv3", "cityscapes-deeplabv3"}


@pytest.mark.parametrize("name", TABLES)
def test_the_paper_s_numbers_are_those_it_prints(name: str) -> None:
    paper = load(name).paper
    assert paper is not None
    assert (paper.full, paper.pfb, paper.saved) == TABLES[name]
    assert load(name).prune_ratio in paper.pfb


@pytest.mark.parametrize(("full_size", "twin"), TWINS.items())
def test_a_twin_has_the_same_task_cut_and_method(full_size: str, twin: str) -> None:
    big, small = load(full_size), load(twin)
    for key in ("task", "cut", "method", "density", "unit", "learning_rate.name", "data.name"):
        assert small.get(key) == big.get(key), key
    assert small.length < big.length
    assert math.prod(small.data.size) < math.prod(big.data.size)
    assert small.paper is None, "the paper's numbers are not of this"
