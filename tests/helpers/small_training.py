"""A recipe small enough to be trained in a test, here or by the command, and whether two runs are the same."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchvision")
pytest.importorskip("torchmetrics")
pytest.importorskip("tensorboard")

from halfway.lab import data
from halfway.lab.data import Data
from halfway.lab.recipes import reading
from halfway.lab.recipes.schema import Recipe
from halfway.lab.training.loop import Training
from halfway.lab.training.run_folder import RunFolder

CPU = torch.device("cpu")
SMALL = {
    "root": "synthetic",
    "data.train_samples": 160,
    "data.test_samples": 40,
    "model.options": {"width": 8, "blocks": [1, 1, 1, 1]},
    "batch_size": 32,
    "length": 4,
    "window": [1, 3],
    "evaluate_every": 2,
}
SETTINGS = [
    f"{key}={json.dumps(value) if not isinstance(value, dict) else '{width: 8, blocks: [1, 1, 1, 1]}'}"
    for key, value in SMALL.items()
    if key != "root"
]

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def small(**changes: Any) -> Recipe:
    return reading.load("tiny-cifar10").with_settings({**SMALL, **changes})


def load(r: Recipe) -> Data:
    return data.load(r.data, r.root)


def trained(r: Recipe, folder: RunFolder | None = None) -> Training:
    training = Training(r, load(r), CPU, folder, show=False)
    assert training.run()
    return training


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def without_times(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # And without what a selector says of its choices, which counts from the moment a run is resumed.
    others = ("seconds", "waited", "load", "chosen_by_density")
    return [{k: v for k, v in m.items() if k not in others} for m in metrics]


def plain(state: Any) -> Any:
    """A state as values that can be compared."""
    if isinstance(state, Tensor):
        return state.double().nan_to_num(nan=-7.0).tolist()
    return {k: plain(v) for k, v in state.items()} if isinstance(state, dict) else state


def assert_same_run(a: RunFolder, b: RunFolder) -> None:
    mine, theirs = a.load(), b.load()
    assert mine is not None
    assert theirs is not None
    assert mine["finished"]
    assert theirs["finished"]
    assert same(mine["model"], theirs["model"])
    assert torch.equal(mine["random"][0]["cpu"], theirs["random"][0]["cpu"])
    for learned in ("blocker", "sampler"):
        assert plain(mine[learned]) == plain(theirs[learned])
    assert torch.equal(mine["retention"]["retained"], theirs["retention"]["retained"])
    assert without_times(a.read_metrics()) == without_times(b.read_metrics())
