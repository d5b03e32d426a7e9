"""`halfway demo`: the digits, and a tiny run of the whole command. What it compares and says is tested elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("torchvision")
pytest.importorskip("matplotlib")
pytest.importorskip("torchmetrics")
pytest.importorskip("jinja2")

from halfway.lab import data
from halfway.lab.cli import main
from halfway.lab.commands import compare
from halfway.lab.comparison import results
from halfway.lab.comparison.verdict import headline, reading
from halfway.lab.recipes import reading as files
from halfway.lab.recipes import schema as recipes


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe with few images and a narrow model."""
    small = {
        "data.train_samples": 120,
        "data.test_samples": 60,
        "model.options": {"width": 8, "blocks": [1, 1, 1, 1]},
        "batch_size": 40,
    }
    load = files.load

    def load_small(name: str) -> recipes.Recipe:
        return load(name).with_settings(small) if name == "digits" else load(name)

    monkeypatch.setattr(files, "load", load_small)


def test_the_demo_is_a_comparison_and_its_report(
    tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "demo"
    command = ["demo", "--out", str(out), "--seeds", "2", "--epochs", "4", "--prune-ratio", "0.4"]
    monkeypatch.setattr(sys, "argv", ["halfway", *command])
    assert main(command) == 0
    said = capsys.readouterr().out
    found = results.read(out)
    assert found is not None
    methods = ["full", "random", "pfb", "random_even", "shorter"]
    assert [row.group.method for row in found.rows] == methods
    assert "random_even" in found.rows[2].controls, "at PFB's cost; a step of these twelve is too coarse for the other"
    assert all(len(row.scores) == 2 for row in found.rows)
    page = (out / "index.html").read_text().replace("\u00a0", " ").replace("−", "-")
    for sentence in (headline(found.rows), *reading(found.rows)):
        assert sentence in said, "printed as the page and the table say it"
        assert sentence in page
    assert (out / "table.md").read_text().count("\n- ") == len(reading(found.rows))
    assert f"Look at {out / 'index.html'}" in said
    assert "Pruned most often" in page, "with pictures"
    assert "full data for fewer steps" in page
    # Once more: nothing is left to do.
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/last.pt")}
    assert main(command) == 0
    assert "10 of 10 runs are done already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/last.pt")} == before


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--prune-ratio", "0"], "share of each batch"),
        (["--prune-ratio", "1"], "share of each batch"),
        (["--prune-ratio", "nan"], "share of each batch"),
        (["--seeds", "0"], "at least 1"),
        (["--epochs", "2"], "at least 3"),
    ],
)
def test_bad_options_are_refused_before_any_training(
    options: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(compare, "carry_out", lambda *_, **__: pytest.fail("trained"))
    assert main(["demo", "--out", str(tmp_path / "never"), *options]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "never").exists()


def test_an_output_that_is_a_file_is_refused_before_any_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "carry_out", lambda *_, **__: pytest.fail("trained"))
    (tmp_path / "file").write_text("mine")
    assert main(["demo", "--out", str(tmp_path / "file")]) == 2
    assert "is a file; choose another folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_missing_dependency_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 2
    assert "pip install '.[lab]' in a checkout" in capsys.readouterr().err


# ------------------------------------------------------------------- the digits


def test_the_split_is_fixed_and_stratified() -> None:
    recipe = files.load("digits")
    a, b = (data.load(recipe.data, "nowhere") for _ in range(2))
    assert a.description == "scikit-learn's digits: 1,200 training images, 597 test images"
    (x, y), (again, _) = (next(iter(d.test.batches(597))) for d in (a, b))
    assert torch.equal(x, again)
    assert x.shape == (597, 3, 16, 16)
    train = a.train.per_class(torch.ones(1200))
    assert train is not None
    assert torch.allclose(train / 1200, y.bincount() / 597, atol=0.005)
    every = torch.stack([a.train.picture(i) for i in range(1200)]).float() / 255
    assert float(every.mean()) == pytest.approx(recipe_colours()[0], abs=0.005)
    assert float(every.std()) == pytest.approx(recipe_colours()[1], abs=0.005)


def recipe_colours() -> tuple[float, float]:
    colours = data.SETS["digits"].colours
    return colours.mean[0], colours.std[0]


def test_the_recipe_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "digits"]) == 0
    assert "name: digits" in capsys.readouterr().out
    assert json.dumps(files.load("digits").as_dict()), "plain values only"
