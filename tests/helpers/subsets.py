"""A recipe that is trained in moments, and its subsets."""

from __future__ import annotations

from pathlib import Path

from halfway.lab.recipes.schema import Recipe
from halfway.lab.training.loop import Training
from halfway.lab.training.run_folder import RunFolder
from tests.helpers.small_training import CPU, load, small

CHANGES = {"model.options": {"width": 16, "blocks": [1, 1, 1, 1]}, "evaluate_every": 4}
WORDS = [
    *("--data", "synthetic", "data.train_samples=160", "data.test_samples=40", "batch_size=32", "length=4"),
    *("model.options={width: 16, blocks: [1, 1, 1, 1]}", "window=[1, 3]", "evaluate_every=4"),
]


def tiny(**changes: object) -> Recipe:
    return small(**{**CHANGES, **changes})


def opened(path: Path, recipe: Recipe) -> RunFolder:
    folder = RunFolder(path)
    folder.open(recipe, resume=False)
    return folder


def recipe_file(path: Path) -> str:
    """The same as a file: on the command line, settings of the model are those of the proxy."""
    path.write_text(
        "extends: tiny-cifar10\n"
        "title: small\n"
        "root: synthetic\n"
        "data: {train_samples: 160, test_samples: 40}\n"
        "model: {options: {width: 16, blocks: [1, 1, 1, 1]}}\n"
        "batch_size: 32\n"
        "length: 4\n"
        "window: [1, 3]\n"
        "evaluate_every: 4\n"
    )
    return str(path)


def stopped(recipe: Recipe, folder: RunFolder, steps: int) -> Training:
    """A training that is interrupted after so many steps."""
    training = Training(recipe, load(recipe), CPU, folder, show=False)
    assert not training.run(lambda: training.step >= steps)
    return training
