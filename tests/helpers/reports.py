"""Small comparisons on synthetic pictures, trained for a report, and the words of its page."""

from __future__ import annotations

import argparse
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pytest.importorskip("torchmetrics")
pytest.importorskip("torchvision")
pytest.importorskip("yaml")

from halfway.lab import data
from halfway.lab.commands import report as report_command
from halfway.lab.comparison import run as comparison
from halfway.lab.comparison import trials
from halfway.lab.recipes import reading
from halfway.lab.recipes.schema import Recipe
from halfway.lab.training import session
from halfway.lab.training.run_folder import RunFolder

CPU = torch.device("cpu")
COMMAND = "halfway compare tiny-cifar10 --data synthetic"


def tiny(**changes: Any) -> Recipe:
    return reading.load("tiny-cifar10").with_settings(
        {
            "root": "synthetic",
            "data.train_samples": 256,
            "data.test_samples": 100,
            "model.options.width": 8,
            "batch_size": 32,
            "length": 4,
            "window": [1, 3],
            "evaluate_every": 2,
            **changes,
        }
    )


def train(folder: Path, recipe: Recipe, methods: Sequence[str], ratios: Sequence[float], **over: Sequence[Any]) -> Path:
    keys = {key.replace("__", "."): values for key, values in over.items()}
    plan = trials.plan(recipe, methods, ratios, [0, 1], keys)
    assert comparison.train_all(plan, folder, CPU, COMMAND)
    return folder


def compare(folder: Path) -> Path:
    """full, random and pfb at two ratios and two seeds; one run more that was never finished; a timing."""
    train(folder, tiny(), ["full", "random", "pfb"], [0.5, 0.7])
    never = RunFolder(folder / "random-0.5-s7")
    never.open(tiny(method="random", prune_ratio=0.5, seed=7), resume=False)
    never.note_session({"command": "halfway train tiny-cifar10 --seed 7", "steps": 32, "data": ""})
    steps = {label: {"median": 0.617, "q1": 0.6, "q3": 0.64, "rounds": 5} for label in ("full", "pfb, p = 0.5")}
    (folder / "timing.json").write_text(json.dumps({"steps": steps, "threads": 1}))
    return folder


def sweep(folder: Path) -> Path:
    recipe = tiny(length=2, window=[1, 2])
    return train(folder, recipe, ["full", "random", "pfb"], [0.5], density__noise=[0.001, 0.01, 1])


def segment(path: Path) -> Path:
    """One run that counts steps, whose samples have several classes each."""
    recipe = reading.load("tiny-voc").with_settings(
        {
            "root": "synthetic",
            "data.train_samples": 64,
            "data.test_samples": 8,
            "data.size": [48, 48],
            "model.options": {"width": 8, "blocks": [1, 1, 1, 1], "head_width": 16},
            "batch_size": 8,
            "length": 12,
            "window": [8, 11],
            "log_every": 4,
            "evaluate_every": 1,
            "multi_scale": [1.0],
            "density.num_centroids": 16,
        }
    )
    folder = RunFolder(path)
    assert session.train(recipe, data.load(recipe.data, recipe.root), CPU, folder, False, "halfway train tiny-voc")
    return folder.path


def parse(*options: str | Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="halfway")
    report_command.register(parser.add_subparsers())
    return parser.parse_args(["report", *map(str, options)])


def write(*options: str | Path) -> int:
    arguments = parse(*options)
    return arguments.run(arguments)


def plain(path: Path) -> str:
    """A page's words, as one reads them."""
    found = re.sub(r"<(style|script)>.*?</\1>", " ", path.read_text(), flags=re.S)
    found = re.sub(r"</?(b|code|em|small|span)\b[^>]*>", "", found)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", found)))
