"""`halfway report` on a stranger's run folder: no code that it names runs, unless one says so."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pytest.importorskip("torchmetrics")
pytest.importorskip("torchvision")
pytest.importorskip("yaml")

from halfway.lab import data
from halfway.lab.cli import main
from halfway.lab.models import by_name as models
from halfway.lab.models import small as nets
from halfway.lab.recipes import reading
from halfway.lab.training import session
from halfway.lab.training.run_folder import RunFolder

NET = {"width": 8, "blocks": [1, 1, 1, 1]}
CENTROIDS = "heaviest of the 64 centroids"
# Builds the model of the run, so that its checkpoint fits, and leaves a trace.
PAYLOAD = f"""
from pathlib import Path
from halfway.lab.models import small
Path("imported").touch()
def make():
    Path("called").touch()
    return small.small_resnet(10, **{NET})
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PFB run."""
    recipe = reading.load("tiny-cifar10").with_settings(
        {
            "root": "synthetic",
            "data.train_samples": 96,
            "data.test_samples": 20,
            "model.options": NET,
            "batch_size": 32,
            "length": 2,
            "window": [0, 2],
        }
    )
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "theirs")
    loaded = data.load(recipe.data, recipe.root)
    assert session.train(recipe, loaded, torch.device("cpu"), folder, False, "halfway train tiny-cifar10")
    return folder.path


@pytest.fixture
def theirs(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run with a module in it, as the current directory."""
    folder = tmp_path / "theirs"
    shutil.copytree(finished, folder)
    (folder / "payload_of_theirs.py").write_text(PAYLOAD)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "payload_of_theirs", raising=False)
    return folder


def name_model(folder: Path, **model: Any) -> None:
    import yaml

    config = folder / "config.yaml"
    content = yaml.safe_load(config.read_text())
    content["model"] = model
    config.write_text(yaml.safe_dump(content))


def test_a_model_of_halfways_own_needs_no_trust(theirs: Path) -> None:
    assert main(["report", "."]) == 0
    assert CENTROIDS in (theirs / "report.html").read_text()
    assert "--trust" not in (theirs / "report.html").read_text()


def test_code_in_a_run_folder_runs_only_if_it_is_trusted(theirs: Path) -> None:
    name_model(theirs, name="payload_of_theirs:make")
    assert main(["report", "."]) == 0
    assert not (theirs / "imported").exists()
    page = (theirs / "report.html").read_text()
    assert CENTROIDS not in page
    assert "<code>payload_of_theirs:make</code>" in page
    assert "<code>halfway report ... --trust</code> builds it; only for runs of your own" in page
    assert "Pruned most often" in page, "what needs no model is there"
    assert main(["report", ".", "--trust"]) == 0
    assert (theirs / "called").exists()
    assert CENTROIDS in (theirs / "report.html").read_text()


@pytest.mark.parametrize(
    "model",
    [
        {"name": "os:abort"},
        {"name": "timm.models:resnet18"},
        {"name": "local-dir:."},
        {"name": "hf-hub:somebody/model"},
        {"name": "resnet18", "options": {"checkpoint_path": "payload.pt"}},
        {"name": "deeplabv3_resnet101", "options": {"weights_backbone": "DEFAULT"}},
        {"name": "resnet50", "options": {"norm_layer": "payload_of_theirs:make"}},
    ],
)
def test_no_model_that_could_run_foreign_code_is_built(
    model: dict[str, Any], theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: Any, **__: Any) -> None:
        pytest.fail("a model was built")

    monkeypatch.setattr(nets, "build", build)
    monkeypatch.setattr(models, "build", build)
    name_model(theirs, **model)
    assert main(["report", "."]) == 0
    assert "--trust" in (theirs / "report.html").read_text()


def test_a_file_of_weights_that_the_run_began_with_is_not_read(theirs: Path) -> None:
    name_model(theirs, name="small_resnet", options=NET, weights="nowhere.pt")
    assert main(["report", "."]) == 0
    assert CENTROIDS in (theirs / "report.html").read_text(), "the checkpoint has the weights"


def test_a_trusted_model_that_fails_costs_its_section_alone(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (theirs / "payload_of_theirs.py").write_text("def make():\n    raise KeyError('gone')\n")
    name_model(theirs, name="payload_of_theirs:make")
    assert main(["report", ".", "--trust"]) == 0
    assert "no centroids: 'gone'" in capsys.readouterr().err
    page = (theirs / "report.html").read_text()
    assert "could not be restored" in page
    assert "Pruned most often" in page


def test_the_help_says_what_trust_allows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "import and build the models that the run folders name; only for your own runs" in said
