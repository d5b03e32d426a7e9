"""The page of a report: one safe file, all numbers of the table, every image described."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pytest.importorskip("torchmetrics")
pytest.importorskip("torchvision")
pytest.importorskip("yaml")

from halfway.lab.comparison import table
from halfway.lab.comparison.results import summarise
from halfway.lab.comparison.results import write as write_results
from halfway.lab.comparison.verdict import headline, reading
from halfway.lab.report import gallery as report_gallery
from halfway.lab.report import page
from halfway.lab.report import runs as report_runs
from halfway.lab.training.run_folder import RunFolder
from tests.helpers.reports import COMMAND, plain, write


def test_the_page_is_one_file_that_needs_nothing_from_outside(written: Path) -> None:
    content = written.read_text()
    assert content.startswith("<!doctype html>")
    sources = re.findall(r"""(?:src|href|srcset)\s*=\s*["']([^"']*)""", content)
    assert sources
    assert all(source.startswith("data:") for source in sources)
    assert not re.search(r"https?://|@import|url\(|<script src|<link", content)
    assert content.count("<script") == 1
    assert [p.name for p in written.parent.iterdir()] == [written.name], "no temporary file is left"
    assert len(content) < 3_000_000


def test_the_page_forbids_all_that_it_does_not_use(written: Path) -> None:
    content = written.read_text()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', content)
    assert policy is not None
    assert policy.start() < content.index("<title>"), "it holds for what comes behind it"
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    assert rules == {
        "default-src": "'none'",
        "script-src": f"'sha256-{script_hash(content)}'",
        "style-src": "'unsafe-inline'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def script_hash(content: str) -> str:
    script = re.search(r"<script>(.*?)</script>", content, flags=re.S)
    assert script is not None
    return base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()


def test_all_images_have_a_description(written: Path) -> None:
    images = re.findall(r"<img [^>]*>", written.read_text())
    assert all(re.search(r'alt="[^"]{3,}"', image) for image in images)
    galleries, centroids = 2 * report_gallery.GALLERY, report_gallery.CENTROIDS * report_gallery.NEAREST
    assert sum("data:image/svg" not in image for image in images) == galleries + centroids


def test_every_number_of_the_table_is_on_the_page(compared: Path, text: str) -> None:
    runs = report_runs.read([compared])
    rows = summarise(runs.groups, runs.timing["steps"])
    assert len(rows) == 5
    for row in rows:
        for cell in table.cells(row):
            assert page.minus(cell) in text
    assert page.minus(table.notes(rows, runs.recipe, runs.session, runs.timing)) in text
    assert "0.62 [0.60, 0.64]" in text, "the comparison's timing is read"
    assert headline(rows) in text
    for sentence in reading(rows):
        assert page.minus(sentence) in text, "the words of the table, and no others"


def test_a_column_that_nobody_measured_is_left_out(swept: Path, tmp_path: Path) -> None:
    write(swept, "--out", tmp_path / "a.html")
    assert "wall" not in re.findall(r"<thead>.*?</thead>", (tmp_path / "a.html").read_text())[0]


def test_an_unfinished_run_is_listed_with_what_to_do(text: str, compared: Path) -> None:
    assert "left out of all that follows: random-0.5-s7 (not a round yet)" in text
    assert "halfway train tiny-cifar10 --seed 7 --resume" in text
    runs = report_runs.read([compared])
    assert sum(map(len, runs.groups.values())) == 10


def test_the_page_tells_how_to_repeat_it_and_no_machine_paths(text: str, written: Path, compared: Path) -> None:
    assert COMMAND in text
    assert torch.__version__ in text
    assert "pfb-0.5-s0" in text
    assert str(compared.parent) not in written.read_text()
    assert "epochs 2 to 3; PFB at layer1" in text


def test_the_headline_stands_beside_what_was_trained(text: str) -> None:
    assert "A small ResNet on a fifth of CIFAR-10, 16 px · synthetic pictures in place of CIFAR-10" in text
    assert "· reduced scale" in text


def test_the_galleries_hold_the_extremes_of_retention(written: Path, compared: Path) -> None:
    offered, retained = torch.zeros(256), torch.zeros(256)
    for seed in (0, 1):
        state = RunFolder(compared / f"pfb-0.5-s{seed}").load()
        assert state is not None
        offered += state["retention"]["offered"]
        retained += state["retention"]["retained"]
    rates = sorted(round(100 * float(r)) for r in (retained / offered)[offered > 0])
    shown = [int(r) for r in re.findall(r"retained in (\d+)\s% \(", written.read_text())]
    assert shown[: report_gallery.GALLERY] == rates[: report_gallery.GALLERY]
    assert shown[report_gallery.GALLERY :] == rates[::-1][: report_gallery.GALLERY]


def test_a_sweep_is_drawn_against_its_setting(swept: Path, tmp_path: Path) -> None:
    write(swept, "--out", tmp_path / "a.html")
    content = (tmp_path / "a.html").read_text()
    assert "Score by density.noise" in content
    assert "density.noise = 0.001, 0.01, 1" in plain(tmp_path / "a.html")


def test_names_and_values_are_escaped(compared: Path, tmp_path: Path) -> None:
    runs = report_runs.read([compared])
    write_results(tmp_path, runs.rows, "halfway compare <b>&</b>", runs.groups, runs.timing)
    content = json.loads((tmp_path / "results.json").read_text())
    content["recipe"]["title"] = "<script>alert(1)</script>"
    content["rows"][0]["group"]["settings"] = [["data.name", '"><img src=x>']]
    (tmp_path / "results.json").write_text(json.dumps(content))
    assert write(tmp_path) == 0
    page_text = (tmp_path / "report.html").read_text()
    assert page_text.count("<script") == 1
    assert "<img" not in page_text
    assert "<b>&</b>" not in page_text
    content["rows"][0]["group"]["method"] = "full;}</style>"
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="unknown method"):
        write(tmp_path)


def test_further_methods_have_colours_of_their_own() -> None:
    methods = ["full", "random", "pfb", "divbs", "infobatch", "loss"]
    for theme in (page.LIGHT, page.DARK):
        colours = theme.colours(methods)
        assert len(set(colours.values())) == len(methods)
        assert colours["pfb"] == theme.known["pfb"]
        assert theme.colours(["divbs", "full"])["divbs"] == colours["divbs"]
    assert "--infobatch:" in page.method_style(methods)
