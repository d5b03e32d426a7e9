"""The page about a study: its words are those of the tables, and nothing is shown that is not there."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pytest.importorskip("yaml")

from halfway.lab.cli import main
from halfway.lab.report import studies
from halfway.lab.report.cells import first_number
from halfway.lab.study import tables
from halfway.lab.study.plan import Run
from tests.lab.study.invented import CONTROLS, PFB, entries, on_the_curves, stage, write

ARMS = {**CONTROLS, **PFB}
CLAIM = {"says": "better <than> full data", "arm": "pfb", "than": "full", "paper": "+0.3"}
LATER = {"says": "not to be judged yet", "arm": "pfb", "than": "later"}


def by(gain: float) -> Any:
    """pfb above both controls by so much."""

    def score(run: Run, cost: float) -> float:
        return on_the_curves(run, cost) + (gain if run.arm == "pfb" else 0.0)

    return score


def study_in(folder: Path, gain: float) -> str:
    arms = {**ARMS, "later": {"method": "early_exit", "prune_ratio": 0.5}}
    stages = {
        "confirm": stage(["ladder-c4", "ladder-c16"], arms, primary=["pfb"], claims=[CLAIM, LATER]),
        "planned": stage(["ladder-f8"], ARMS),
    }
    lines = [line for line in entries(stages, by(gain)) if line["arm"] != "later" and line["stage"] != "planned"]
    write(folder, stages, lines)
    assert main(["report", str(folder)]) == 0
    return (folder / "report.html").read_text()


def test_the_page_says_what_the_tables_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = study_in(tmp_path, gain=-4.0)
    assert "2 stages. Look at" in capsys.readouterr().out
    assert "<h1>So far a contender is better than both controls at equal cost in none of 2 comparisons</h1>" in page
    study = studies.read(tmp_path)
    shown = re.findall(r'<tr data-label="([^"]*)">(.*?)</tr>', page, re.S)
    expected = [tables.cells(study, each) for each in study.gains["confirm"]]
    bases = [each.arm.base for each in study.gains["confirm"]]
    assert [label for label, _ in shown] == [f"{c[0]} {b} confirm" for c, b in zip(expected, bases, strict=True)]
    for (_, row), cells in zip(shown, expected, strict=True):
        found = map(html.unescape, re.findall(r"<td[^>]*>(.*?)</td>", row))
        texts = [text.replace("−", "-").replace("\u00a0", " ") for text in found]
        assert [text for text in texts[3:] if text] == [cell for cell in cells[1:] if cell]
    assert "worse in all 2 settings" in page
    assert page.count('<figure class="map">') == 1


def test_the_file_of_a_study_stands_for_its_folder(tmp_path: Path) -> None:
    page = study_in(tmp_path, gain=4.0)
    (tmp_path / "report.html").unlink()
    assert main(["report", str(tmp_path / "study.yaml")]) == 0
    assert (tmp_path / "report.html").read_text() == page


def test_a_contender_that_is_better_is_in_the_headline(tmp_path: Path) -> None:
    assert "better than both controls at equal cost in 2 of 2 comparisons: pfb</h1>" in study_in(tmp_path, gain=6.0)


def test_claims_are_escaped_and_those_without_results_left_out(tmp_path: Path) -> None:
    page = study_in(tmp_path, gain=6.0)
    assert "better &lt;than&gt; full data" in page
    assert "not to be judged yet" not in page
    assert "None of its 27 runs is there yet." in page


def test_without_a_family_all_is_exploratory_and_without_ladders_there_is_no_map(tmp_path: Path) -> None:
    stages = {"tail": stage(["ladder-c16-tailed"], ARMS)}
    write(tmp_path, stages, entries(stages, on_the_curves))
    page = studies.write(studies.read(tmp_path), tmp_path, "My study")
    assert "all of this is exploratory" in page
    assert "My study" in page
    assert 'class="map"' not in page


def test_a_family_without_results_is_not_a_finding(tmp_path: Path) -> None:
    stages = {"screen": stage(["ladder-c4"], ARMS), "confirm": stage(["ladder-c4"], PFB, [7], primary=["pfb"])}
    write(tmp_path, stages, [line for line in entries(stages, on_the_curves) if line["stage"] == "screen"])
    page = studies.write(studies.read(tmp_path), tmp_path)
    assert "The 1 comparisons that were named beforehand have no results yet" in page


def test_words_sort_by_their_order_and_verdicts_from_better_to_worse(tmp_path: Path) -> None:
    study_in(tmp_path, gain=6.0)
    table = studies._table(studies.read(tmp_path), ["confirm"])
    by_recipe = [row["cells"][1] for row in table["rows"]]
    assert by_recipe[0] == {"text": "ladder-c4", "sort": 0}
    assert by_recipe[-1] == {"text": "ladder-c16", "sort": -1}
    verdicts = {cell["sort"] for row in table["rows"] for cell in row["cells"] if cell["text"].startswith("better")}
    assert verdicts == {"2"}, "the last of worse, not told apart, better"


@pytest.mark.parametrize("ledger", [True, False])
def test_a_study_without_results_says_how_to_get_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ledger: bool
) -> None:
    write(tmp_path, {"confirm": stage(["ladder-c4"], ARMS)}, [])
    if not ledger:
        (tmp_path / "runs.jsonl").unlink()
    assert main(["report", str(tmp_path)]) == 2
    assert "halfway study" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("cell", "number"),
    [("+0.37 [+0.07, +0.68]", "+0.37"), ("≤ 0.50 [0.50, 0.52]", "0.50"), ("-3", "-3"), ("worse", ""), ("", "")],
)
def test_cells_sort_by_their_first_number(cell: str, number: str) -> None:
    assert first_number(cell) == number
