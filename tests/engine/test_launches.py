"""What a replayed step launches beyond training on the retained samples: counts, the same on every machine."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch
from torch import nn

from halfway.lab.models.by_name import build
from tests import ROOT

BENCHMARKS = ROOT / "benchmarks"
RESULT = BENCHMARKS / "results" / "launches.json"
SELECTION = 95  # of `density`, nearly the same for every model

spec = importlib.util.spec_from_file_location("launches", BENCHMARKS / "launches.py")
launches = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launches)


def check(found: dict[str, Any]) -> None:
    """The bound, part by part."""
    norms = found["normalisations"]
    # All samples run through the shallow part once. Of a BatchNorm the statistics are copied (one launch), and the
    # counter of batches (another); all counters get their values back in one.
    overwritten = found["probe"] - found["shallow"] - 2 * norms - (norms > 0)
    assert 0 <= overwritten <= found["answered"], "a recording that would be overwritten is copied, at most once each"
    # A gather stands in for each operation that is answered; attention and pooling have two outputs, and a random draw
    # is gathered too.
    assert found["gathers"] <= 2 * found["answered"]
    # Of a BatchNorm the variance is recovered and the counter copied; running statistics move in three launches.
    assert found["replay"] <= 2 * norms + 3
    assert found["batch"] == 1
    assert found["selection"] <= SELECTION
    assert found["added"] == (
        found["probe"] + found["selection"] + found["batch"] + found["gathers"] - found["answered"] + found["replay"]
    )


def test_views_and_allocations_are_no_launches_and_writes_are() -> None:
    with launches.Counting() as counting:
        t = torch.empty(3, 4)
        t.view(4, 3).T[0].detach()
        t.fill_(1.0)
        with counting.part("other"):
            t.add_(t.sum())
    assert counting.found == {"rest": 1, "other": 2}


def test_a_small_model_by_hand() -> None:
    def make() -> nn.Module:
        stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        return nn.Sequential(stem, nn.Flatten(), nn.Linear(4 * 6 * 6, 2))

    found = launches.count(make, "0", (3, 8, 8))
    check(found)
    # Convolution, counter, BatchNorm, ReLU; then the copies of statistics and counter, and the counter put back.
    assert (found["shallow"], found["probe"], found["normalisations"]) == (4, 7, 1)
    assert (found["answered"], found["gathers"]) == (1, 1)
    assert found["replay"] == 5


@pytest.mark.parametrize(
    ("title", "name", "side", "options"),
    [
        ("ResNet-18", "resnet18", 32, {}),
        ("ViT-S/16", "vit_small_patch16_224", 32, {"size": 32}),
        ("Swin-T", "swin_t", 32, {}),
    ],
)
def test_what_a_replayed_step_adds(title: str, name: str, side: int, options: dict[str, Any]) -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("timm")
    published = json.loads(RESULT.read_text())
    row = next(row for row in published["models"] if row["model"] == title)
    found = launches.count(lambda: build(name, **options), row["at"], (3, side, side))
    check(found)
    if published["versions"]["torch"] == torch.__version__:
        # Swin leaves out shifts behind the cut where images are small. What is added is the same.
        assert {**row, **found, "plain": row["plain"]} == row, "python benchmarks/launches.py writes it again"


def test_the_published_numbers_keep_to_the_bound() -> None:
    models = json.loads(RESULT.read_text())["models"]
    assert len(models) == 9
    for found in models:
        check(found)
