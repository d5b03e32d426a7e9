"""Score by cost: a dot for every row, and a curve where there is one."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pytest.importorskip("torchmetrics")
pytest.importorskip("torchvision")
pytest.importorskip("yaml")

from halfway.lab.comparison.results import summarise
from halfway.lab.comparison.trials import group_of
from halfway.lab.report import page, scatter
from halfway.lab.report import runs as report_runs
from tests.lab.comparison.test_curves import comparison
from tests.lab.comparison.test_table import result


def test_every_row_has_a_dot_with_n_and_interval(written: Path, compared: Path) -> None:
    content = html.unescape(written.read_text())
    for row in report_runs.read([compared]).rows:
        dot = re.search(rf'<g class="point"[^>]*data-label="{row.group.label}".*?</title>', content, flags=re.S)
        assert dot is not None
        assert f"(n = {len(row.scores)}) at {row.cost:.3f} of the FLOPs" in dot[0]
        for d in (row.minus_full, row.minus_random):
            assert d is None or page.minus(str(d)) in dot[0]
    assert content.count('<line class="curve"') == 2, "through random pruning at both ratios and full data"


def test_controls_have_curves_that_end_at_full_data() -> None:
    plot = scatter.score_by_cost(summarise(comparison(), {}), "accuracy, %", "epoch")
    assert plot["titles"] == {
        "random_even": "random pruning without window",
        "shorter": "full data for fewer steps",
    }
    assert [len(curve["pieces"]) for curve in plot["curves"]] == [2, 2]
    (tip,) = [point["tip"] for point in plot["points"] if point["label"] == "pfb, p = 0.5"]
    assert "random pruning without window, same cost (" in tip
    assert "reached at 0." in tip


def test_full_data_for_fewer_epochs_have_a_curve_of_their_own() -> None:
    groups: Any = {
        group_of("full", None, {}): {0: result("full", 0.0, 0, 90.0)},
        group_of("full", None, {"length": 6}): {0: result("full", 0.0, 0, 85.0, seen=600, spent=600.0, retained=600)},
        group_of("pfb", 0.5, {}): {0: result("pfb", 0.5, 0, 80.0)},
    }
    plot = scatter.score_by_cost(summarise(groups, {}), "accuracy, %", "epoch")
    assert plot["titles"] == {"full": "full data for fewer epochs"}
    assert [len(curve["pieces"]) for curve in plot["curves"]] == [1]
    assert [point["text"] for point in plot["points"]] == ["", "6 epochs", "p = 0.5"]
