"""Figures: which classes are shown."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pytest.importorskip("torchmetrics")
pytest.importorskip("torchvision")
pytest.importorskip("yaml")

from halfway.lab.report import plots as report_plots


def test_of_many_classes_both_ends_are_shown() -> None:
    rates = torch.arange(100).flip(0) / 100
    shown = report_plots.shown_classes(rates)
    assert len(shown) == 31
    assert shown[:2] == [99, 98]
    assert shown[15] is None
    assert shown[-1] == 0
    few = torch.tensor([0.5, float("nan"), 0.2])
    assert report_plots.shown_classes(few) == [2, 0], "a class that never occurred has no rate"
