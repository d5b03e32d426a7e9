"""Claims of a paper: what reproduces one, what speaks against it, and when nothing can be said."""

from __future__ import annotations

from math import log
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")
pytest.importorskip("yaml")

from halfway.lab.comparison.paired import Difference
from halfway.lab.study import plan, tables
from halfway.lab.study.claims import word
from halfway.lab.study.results import collect

from .invented import CONTROLS, PFB, PFB_COST, entries, on_the_curves, stage

CLAIMS: list[dict[str, Any]] = [
    {"says": "better than full data", "arm": "pfb", "than": "full", "paper": "+0.3"},
    {"says": "better than a third of the steps", "arm": "pfb", "than": "shorter 0.7"},
    {"says": "another draw changes little", "arm": "random 0.5 again", "than": "random 0.5", "within": 2},
    {"says": "better than what never ran", "arm": "pfb", "than": "nobody"},
]
ARMS = {**CONTROLS, **PFB, "nobody": {"method": "last_loss_hard", "prune_ratio": 0.5}}
STAGES = {"paper": stage(["ladder-c4"], ARMS, claims=CLAIMS)}


def between(low: float | None, high: float | None) -> Difference:
    return Difference(0.0, None, low, high, 3, None)


@pytest.mark.parametrize(
    ("low", "high", "within", "expected"),
    [
        (0.1, 0.5, None, "reproduced"),
        (-0.5, -0.1, None, "not reproduced"),
        (-0.1, 0.5, None, "not told apart"),
        (None, None, None, "not told apart"),
        (-0.4, 0.9, 1, "reproduced"),
        (0.2, 0.9, 1, "reproduced"),  # a difference, but a smaller one than the margin
        (0.2, 1.2, 1, "not told apart"),
        (1.1, 1.9, 1, "not reproduced"),
        (-1.9, -1.1, 1, "not reproduced"),
        (-3.0, 3.0, 1, "not told apart"),  # zero within a wide interval shows nothing
    ],
)
def test_the_word_for_an_interval(low: float | None, high: float | None, within: float | None, expected: str) -> None:
    assert word(between(low, high), within) == expected


def test_the_page_has_each_claim_with_its_difference_and_verdict() -> None:
    lines = [line for line in entries(STAGES, on_the_curves) if line["arm"] != "nobody"]
    text = tables.page(collect(STAGES, lines), ["paper"], "halfway study x --table", None)
    rows = {cells[1]: cells for line in text.splitlines() if len(cells := [c.strip() for c in line.split("|")]) == 8}
    assert rows["better than full data"][2:5] == ["pfb", "full", "+0.3"]
    # On the invented curves random pruning at 0.62 of the cost, which is what pfb reaches, loses 3.8 points.
    assert float(rows["better than full data"][5].split()[0]) == pytest.approx(8 * log(PFB_COST), abs=0.5)
    assert rows["better than full data"][6] == "not reproduced"
    assert rows["better than a third of the steps"][6] == "reproduced"
    assert rows["another draw changes little"][6] == "reproduced"
    assert rows["better than what never ran"][5:7] == ["", "missing"]


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ({"says": "x", "arm": "pfb", "than": "ful"}, "a claim names 'ful', which is no arm of it; did you mean full"),
        ({"says": "x", "arm": "pfb"}, "a claim has says, arm and than"),
        ({"says": "x", "arm": "pfb", "than": "full", "margin": 1}, "a claim has says, arm and than"),
    ],
)
def test_a_claim_that_says_nothing_about_the_arms_is_refused(
    claim: dict[str, Any], message: str, tmp_path: Path
) -> None:
    import yaml

    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({"stages": {"paper": stage(["ladder-c4"], ARMS, claims=[claim])}}))
    with pytest.raises(ValueError, match=message):
        plan.read(path)
