"""`halfway report`, the command: any kind of run, with or without data and run folders, and what it refuses."""

from __future__ import annotations

import html
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pytest.importorskip("torchmetrics")
pytest.importorskip("torchvision")
pytest.importorskip("yaml")

from halfway.lab import data, report
from halfway.lab.cli import main
from halfway.lab.comparison import table
from halfway.lab.comparison.results import write as write_results
from halfway.lab.comparison.verdict import headline
from halfway.lab.recipes import reading
from halfway.lab.report import page
from halfway.lab.report import runs as report_runs
from halfway.lab.training.run_folder import RunFolder
from tests.helpers.reports import COMMAND, plain, tiny, write


def test_segmentation_runs_have_a_page_too(segmented: Path) -> None:
    assert write(segmented) == 0
    text = plain(segmented / "report.html")
    assert "mean intersection over union" in text
    assert "Pruned most often" in text
    assert "What the density is made of" in text
    assert "steps 9 to 11; PFB at backbone.layer3" in text
    assert "PFB at p = 0.5: " in text, "a single run has a headline as well"


def test_the_way_to_know_the_classes_of_masks_is_one(segmented: Path, tmp_path: Path) -> None:
    """Masks that are read from disk are not counted; the page says with which settings they are."""
    shutil.copytree(segmented, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    state = folder.load()
    assert state is not None
    folder.save({**state, "retention": {**state["retention"], "class_offered": [], "class_retained": []}})
    assert write(folder.path, "--data", tmp_path / "moved") == 0
    advice = re.search(r"With (data\.\S+=.*?) it is counted", plain(folder.path / "report.html"))
    assert advice is not None
    from_disk = reading.load(str(folder.config)).with_settings({"data.memory": False, "data.augment": "segmentation"})
    assert data.load(from_disk.data, "synthetic").train.per_class(torch.ones(64)) is None
    counted = from_disk.with_settings(reading.parse_settings(advice[1].split()))
    assert data.load(counted.data, "synthetic").train.per_class(torch.ones(64)) is not None


def test_without_the_data_all_but_the_pictures_is_there(
    compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(compared, "--data", tmp_path / "moved", "--out", tmp_path / "a.html") == 0
    content = (tmp_path / "a.html").read_text()
    assert str(tmp_path) not in content
    assert "The data set was not found when this page was written" in content
    assert content.count("<figure>") == 5
    assert "airplane" in html.unescape(content), "the classes' names are known without the data"
    assert str(tmp_path / "moved") in capsys.readouterr().err, "whoever runs it is told where it was looked for"


def test_data_of_another_size_are_not_mistaken_for_the_runs_own() -> None:
    pictures = report.load_pictures(tiny(), None, 300)
    assert pictures.data is None
    assert "256 training samples, but the runs saw 300" in pictures.reason


def test_of_a_comparison_without_its_runs_the_table_is_shown(compared: Path, tmp_path: Path) -> None:
    runs = report_runs.read([compared])
    write_results(tmp_path, runs.rows, COMMAND, runs.groups, runs.timing)
    assert write(tmp_path) == 0
    text = plain(tmp_path / "report.html")
    for row in runs.rows:
        assert all(page.minus(cell) in text for cell in table.cells(row))
    assert headline(runs.rows) in text
    assert COMMAND in text
    assert "curves, retention and pictures need the run folders" in text


def test_a_title_replaces_the_recipes_name(compared: Path, tmp_path: Path) -> None:
    write(compared / "pfb-0.5-s0", "--out", tmp_path / "a.html", "--title", "Mine <&> yours")
    content = (tmp_path / "a.html").read_text()
    assert '<p class="over">Mine &lt;&amp;&gt; yours</p>' in content


def test_an_output_that_is_a_folder_is_refused(compared: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder; name a file in it"):
        write(compared, "--out", tmp_path)


def test_a_missing_dependency_says_what_to_install(
    compared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(compared), "--out", str(tmp_path / "a.html")]) == 2
    assert "pip install '.[lab]' in a checkout" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
