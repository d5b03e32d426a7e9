"""Every example runs as it stands, in a process of its own, and is short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.helpers.launched import run

EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
# What to run, with few steps, and what it prints.
RUNS: dict[str, tuple[list[str], list[str]]] = {
    "timm_loop.py": (
        ["--model", "test_resnet", "--epochs", "1", "--samples", "192"],
        ["epoch 0: loss", "steps_replayed=2", "steps_recomputed=1"],
    ),
    "torchvision_reference.py": (
        ["--epochs", "1", "--samples", "192"],
        ["epoch 0: loss", "steps_replayed=2", "steps_recomputed=1"],
    ),
}
# Run by tests of their own; digits.py is only the others' data.
ELSEWHERE = {
    "accelerate_loop.py": "integrations/test_accelerate.py",
    "hf_trainer.py": "integrations/test_transformers.py",
    "lightning_trainer.py": "integrations/test_lightning.py",
    "torchrun.py": "test_examples.py",
    "digits.py": "test_examples.py",
}


@pytest.mark.parametrize("name", RUNS)
def test_it_runs_and_says_what_was_replayed(name: str) -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("sklearn")
    if "timm" in name:
        pytest.importorskip("timm")
    arguments, words = RUNS[name]
    out = run(f"examples/{name}", *arguments)
    for word in (*words, "effective_ratio=0.4"):
        assert word in out


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_short_and_a_test_runs_it(name: str) -> None:
    text = (ROOT / "examples" / name).read_text()
    assert len(text.splitlines()) < 60
    assert text.startswith('"""')
    if name not in RUNS:
        assert name in ELSEWHERE, f"say in RUNS how to run examples/{name}"
        assert re.search(rf"\b{Path(name).stem}\b", (ROOT / "tests" / ELSEWHERE[name]).read_text())


def test_torchrun_starts_it_on_two_processes() -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("sklearn")
    out = run("examples/torchrun.py", "--epochs", "1", "--samples", "128", processes=2)
    assert out.count("epochs 0 to 1, 2 processes") == 1
    assert "steps_replayed=2, steps_recomputed=0" in out


# One process for three trainings, since importing takes longer than they do.
SEVERAL = """
import runpy, sys
sys.path.insert(0, "examples")
for file, epochs in (("at_once", "2"), ("resumed", "1"), ("resumed", "2")):
    sys.argv[1:] = ["--samples", "96", "--epochs", epochs, "--checkpoint", f"{folder}/{file}.pt"]
    runpy.run_path("examples/torchrun.py", run_name="__main__")
"""


@pytest.mark.slow
def test_torchrun_resumes_where_a_killed_training_was(tmp_path: Path) -> None:
    """Two epochs at once, and one after the other from the checkpoint: the same weights, to the last bit."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchvision")
    pytest.importorskip("sklearn")
    out = run("-c", f"folder = {str(tmp_path)!r}\n{SEVERAL}")
    assert re.findall("epochs . to .", out) == ["epochs 0 to 2", "epochs 0 to 1", "epochs 1 to 2"]
    at_once, resumed = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("at_once", "resumed"))
    assert at_once["epoch"] == resumed["epoch"] == 1
    assert all(torch.equal(tensor, resumed["model"][name]) for name, tensor in at_once["model"].items())
    assert at_once["blocker"]["counters"] == resumed["blocker"]["counters"]
    assert at_once["blocker"]["counters"]["replayed_steps"] == 6
    assert not list(tmp_path.glob("*.tmp"))


def test_the_notebook_shows_a_saving() -> None:
    """`examples/quickstart.ipynb` as it stands, but with fewer samples and rounds."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    traitlets = pytest.importorskip("traitlets.config")
    pytest.importorskip("ipykernel")
    pytest.importorskip("torchvision")
    pytest.importorskip("sklearn")
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    settings = notebook.cells[1]
    settings.source, changed = re.subn(r"SAMPLES = \d+", "SAMPLES = 128", settings.source)
    settings.source, more = re.subn(r"ROUNDS = \d+", "ROUNDS = 1", settings.source)
    assert changed == more == 1
    notebook.cells[2].source = "import torch\n\ntorch.set_num_threads(1)\n" + notebook.cells[2].source
    # Files instead of ports: nothing else on the machine can be in the way.
    config = traitlets.Config({"KernelManager": {"transport": "ipc"}})
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", config=config).execute()
    printed = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
    assert "steps_replayed=2, steps_recomputed=0" in printed
    assert "counted in FLOPs: 0.55" in printed


def test_the_notebook_is_kept_with_what_it_printed() -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    printed = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
    assert "counted in FLOPs" in printed
    assert "seed 0" in printed
