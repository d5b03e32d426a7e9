"""The full-size recipes really train: two pruned steps and one evaluation batch, on synthetic pictures.

Everything is as the recipe says (model, image size, optimizer, policy, precision, cut, ratio) but the batch, which is
as small as the ratio allows: the paper's batches of 1,024 do not fit into an ordinary machine's memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("torchmetrics")
pytest.importorskip("timm")

from halfway.lab import data
from halfway.lab.recipes import reading
from halfway.lab.training.loop import Training

CPU = torch.device("cpu")
FLOAT = {"precision": "float32"}
# The smallest batches that leave two samples at the paper's ratios. What takes minutes on a CPU, the large crops and
# emulated bfloat16, is marked slow, with a smaller stand-in for every day.
CASES = [
    pytest.param("cifar10-resnet18", {"batch_size": 16}, id="cifar10-resnet18"),
    pytest.param("cifar100-resnet18", {"batch_size": 16}, id="cifar100-resnet18", marks=pytest.mark.slow),
    pytest.param(
        "imagenet-resnet50", {"batch_size": 6, **FLOAT}, id="imagenet-resnet50, float32", marks=pytest.mark.slow
    ),
    pytest.param("imagenet-swin-t", {"batch_size": 6, **FLOAT}, id="imagenet-swin-t, float32", marks=pytest.mark.slow),
    pytest.param("voc2012-deeplabv3", {"batch_size": 7, "data.size": [128, 128]}, id="voc2012-deeplabv3, small crop"),
    pytest.param(
        "cityscapes-deeplabv3",
        {"batch_size": 3, "data.size": [96, 192]},
        id="cityscapes, small crop",
        marks=pytest.mark.slow,
    ),
    pytest.param("imagenet-resnet50", {"batch_size": 6}, id="imagenet-resnet50", marks=pytest.mark.slow),
    pytest.param("imagenet-swin-t", {"batch_size": 6}, id="imagenet-swin-t", marks=pytest.mark.slow),
    pytest.param("voc2012-deeplabv3", {"batch_size": 7}, id="voc2012-deeplabv3", marks=pytest.mark.slow),
    pytest.param("cityscapes-deeplabv3", {"batch_size": 3}, id="cityscapes-deeplabv3", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_a_full_size_recipe_takes_two_pruned_steps_and_evaluates(name: str, changes: dict[str, Any]) -> None:
    settings = {
        "data.train_samples": 3 * changes["batch_size"],
        "data.test_samples": 2,
        "data.workers": 0,
        "window": [0, None],
        **changes,
    }
    r = reading.load(name).with_settings(settings)
    training = Training(r, data.load(r.data, "synthetic"), CPU, show=False)
    training.model.train()
    before = {k: v.clone() for k, v in training.model.named_parameters()}
    assert training.blocker is not None
    training.blocker.set_epoch(0)
    for x, y, ids in training.data.train.batches(training.order.epoch(0)[:2]):
        assert x.shape[2:] == r.data.size
        assert training.train_step(x, y, ids).isfinite()
    stats = training.blocker.stats
    assert (stats.steps_replayed, stats.steps_recomputed) == (2, 0)
    assert stats.effective_ratio == pytest.approx(r.prune_ratio, abs=0.5 / r.batch_size)
    unmoved = [k for k, v in training.model.named_parameters() if torch.equal(v, before[k])]
    assert not unmoved
    score = training.task.evaluate(training.model, training.data.test, CPU, r.multi_scale[:1], limit=1).score
    assert 0 <= score <= 100
