"""What a steady step calls on the host: a count, the same on every machine with these versions."""

from __future__ import annotations

import importlib.util

import pytest

from tests import ROOT

pytest.importorskip("torchvision")
pytest.importorskip("timm")

spec = importlib.util.spec_from_file_location("host", ROOT / "benchmarks" / "host.py")
host = importlib.util.module_from_spec(spec)
spec.loader.exec_module(host)


def test_a_replayed_step_of_resnet18_calls_at_most_4000_functions() -> None:
    make, side, (at, _) = host.MODELS["ResNet-18"]
    found = host.count(make, side, at)
    assert found["plain"] < found["floor"] < found["replayed"] <= 4000, found


def test_what_a_step_calls_does_not_grow_with_what_lies_behind_the_cut() -> None:
    """Nothing walks through the whole model in a usual step."""
    from torchvision.models import resnet

    small, large = (
        host.count(lambda deep=deep: resnet.ResNet(resnet.BasicBlock, [1, 1, 1, deep], num_classes=10), 32, "layer1")
        for deep in (1, 6)
    )
    assert small["replayed"] - small["floor"] == pytest.approx(large["replayed"] - large["floor"], abs=20)
