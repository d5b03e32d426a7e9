"""What the documents list is what there is."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")

from halfway.coresets import METHODS as CORESETS
from halfway.lab import cli
from halfway.lab.commands import compare
from halfway.lab.recipes import methods
from halfway.samplers import SAMPLERS
from halfway.selectors import SELECTORS
from tests import ROOT

DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", [n for n in methods.names() if n != "full"])
def test_every_method_has_its_line(name: str) -> None:
    assert f"`{name}`" in (DOCS / "rivals.md").read_text()


@pytest.mark.parametrize("name", CORESETS)
def test_every_coreset_has_its_line_with_a_link_to_its_card(name: str) -> None:
    assert f"| [`{name}`](reference/methods.md#{name}) |" in (DOCS / "rivals.md").read_text()


def test_the_help_of_train_lists_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    words = capsys.readouterr().out.replace(",", " ").split()
    assert set(methods.names()) <= set(words)


def test_some_page_explains_every_option_of_compare() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    compare.register(commands)
    shown = [action for action in commands.choices["compare"]._actions if action.help != argparse.SUPPRESS]
    options = [option for action in shown for option in action.option_strings]
    words = {word for page in DOCS.rglob("*.md") for word in re.findall(r"--[a-z-]+", page.read_text())}
    assert "--controls" in options
    assert {option for option in options if option.startswith("--")} - {"--help"} <= words


@pytest.mark.parametrize("kind", [*SELECTORS.values(), *SAMPLERS.values(), *CORESETS.values()])
def test_every_method_has_a_card(kind: type) -> None:
    card = kind.__doc__ or ""
    for part in ("What:", "Source:", "Cost:", "Caveats:"):
        assert part in card, f"{kind.__name__} does not say {part}"


def test_no_page_says_to_install_it_by_name() -> None:
    """It is not on PyPI: another project under that name would be installed."""
    folders = ("docs", "src/halfway", "examples", "benchmarks")
    pages = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    texts = {path: path.read_text() for path in pages if path.suffix in (".md", ".py", ".yaml")}
    assert len(texts) > 50
    wrong = re.compile(r"""pip install +["']?halfway\b""")
    assert all(map(wrong.search, ('`pip install "halfway[lab]"`', "pip install halfway")))
    assert [str(path) for path, text in texts.items() if wrong.search(text)] == []


def script(name: str) -> Any:
    """A script of `docs/`, as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_every_message_that_troubleshooting_quotes_is_in_the_source() -> None:
    page, source = script("troubleshooting"), script("messages").messages()
    parts = [part for entries in page.TABLES.values() for entry in entries for part in entry.parts]
    assert len(parts) > 40
    assert [part for part in parts if not page.having(part, source)] == []


def test_every_message_that_compatibility_quotes_is_in_the_source() -> None:
    """In the tables that are written by hand; dots, numbers and S stand for values."""
    texts = [message.text for message in script("messages").messages()]
    page = (DOCS / "compatibility.md").read_text()
    page = re.sub(r"<!-- (?:matrix|zoo):.*?<!-- end of the \w+ -->|`[^`]*`", "", page, flags=re.DOTALL)
    quoted = [words for words in re.findall(r'"([^"\n]+)"', page) if len(words.split()) >= 3]
    assert len(quoted) > 20
    value = r"\(\.\.\.\)|'\.\.\.'|\.\.\.|\bS\b|\b\d+\b"
    patterns = {w: ".*".join(re.escape(part.strip()) for part in re.split(value, w)) for w in quoted}
    assert [w for w, pattern in patterns.items() if not any(re.search(pattern, t, re.DOTALL) for t in texts)] == []


def test_troubleshooting_has_every_warning_and_every_reason_for_computing() -> None:
    page, source = script("troubleshooting"), script("messages").messages()
    wanted = {message.text for message in source if message.kind in ("reason", "warning")}
    assert len(wanted) > 30
    parts = [part for entries in page.TABLES.values() for entry in entries for part in entry.parts]
    missing = [text for text in wanted if not any(part in text for part in parts)]
    assert missing == [], "add what happened and what to do to docs/troubleshooting.py"


def test_troubleshooting_is_what_its_script_writes() -> None:
    page = script("troubleshooting")
    assert page.PAGE.read_text() == page.render(page.PAGE.read_text()), "run python docs/troubleshooting.py"


LINK = re.compile(
    r"(?<!!)\[[^\]\[]*(?:\[[^\]]*\][^\]\[]*)*\]\(([^)\s]+)\)|<img[^>]*src=\"([^\"]+)\"|!\[[^\]]*\]\(([^)\s]+)\)"
)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", t).lower()).replace(" ", "-") for t in titles}


@pytest.mark.parametrize(
    "page",
    [
        str(p.relative_to(ROOT))
        for f in (".", "docs", "docs/integrations", "docs/reference", "benchmarks", "benchmarks/results", "results")
        for p in sorted((ROOT / f).glob("*.md"))
    ],
)
def test_no_link_is_dead(page: str) -> None:
    path = ROOT / page
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    dead = []
    for link in ("".join(found) for found in LINK.findall(text)):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


# Names that the code blocks of all pages may use.
SETUP = """
from types import SimpleNamespace
from unittest import mock
import torch, halfway
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from halfway.integrations.transformers import BlockingMixin
from transformers import Trainer
dataset = TensorDataset(torch.randn(8, 3, 8, 8), torch.arange(8) % 2)
loader = DataLoader(dataset, batch_size=8)
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
optimizer, criterion, device = torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), "cpu"
blocker = halfway.ForwardBlocker(model, "0", 0.5)
scaler, mixup, step, writer, wandb = torch.amp.GradScaler("cpu"), lambda x, y: (x, y), 0, mock.Mock(), mock.Mock()
self = mock.Mock(global_step=0, blocker=blocker, trainer=SimpleNamespace(log_every_n_steps=50))
"""
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def blocks(page: Path) -> list[str]:
    """The Python code of a page, except blocks below a comment that says why they cannot be run."""
    found = re.findall(r"(<!-- not run: .*? -->\n+)?^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [code for reason, code in found if not reason]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES if blocks(page)])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page one after the other, in one namespace."""
    for package in ("sklearn", "torchvision", "timm", "transformers"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    # A selector's file imports relatively.
    names: dict[str, Any] = {"__name__": "halfway.selectors.page", "__package__": "halfway.selectors"}
    exec(SETUP if "tutorial" not in page else "", names)
    for code in blocks(ROOT / page):
        if "ForwardBlocker(" in code and "blocker" in names:
            names["blocker"].remove()
        quick = code.replace("num_workers=4", "num_workers=0").replace("range(200)", "range(2)")
        exec(compile(quick, page, "exec"), names)


def prose(page: Path) -> str:
    """A page without code blocks, code in the text, links and names such as ResNet-50."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`|\]\([^)]*\)|\b[A-Z]\w*-\d+", "", text)


def test_the_readme_can_be_read_in_one_go() -> None:
    readme = ROOT / "README.md"
    assert len(readme.read_text().splitlines()) <= 130
    numbers = re.findall(r"(?<![\w.-])\d[\d.-]*(?![\w])", prose(readme))
    assert len(numbers) <= 15, numbers


def test_the_costs_in_the_readme_are_those_that_were_measured() -> None:
    """Of ResNet-50; as in the tables of `benchmarks/results/`."""
    rows = re.findall(
        r"^\| \D+ \| \**(0\.\d+)\** \| \**(0\.\d+)\** \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    page = (ROOT / "benchmarks" / "results" / "README.md").read_text()
    flops, wall, *_ = (line for line in page.splitlines() if line.startswith("| ResNet-50,"))
    assert len(rows) == 3
    for counted, measured in rows:
        assert counted in flops
        assert measured in wall


def test_the_picture_is_what_its_script_draws() -> None:
    drawing = script("figures/halfway")
    assert drawing.OUT.read_text() == drawing.draw(), "run python docs/figures/halfway.py"


def test_the_reference_has_every_method_and_every_command() -> None:
    page = (DOCS / "reference" / "methods.md").read_text()
    for room, methods_by_name in (("selectors", SELECTORS), ("samplers", SAMPLERS), ("coresets", CORESETS)):
        for name, kind in methods_by_name.items():
            assert f"### `{name}`\n\n::: halfway.{room}.{kind.__name__}\n" in page, name
    listed = re.findall(r"^\| `halfway (\w+)", (DOCS / "reference" / "command_line.md").read_text(), re.MULTILINE)
    assert listed == list(cli._COMMANDS)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ForwardBlocker" in (tmp_path / "reference" / "python" / "index.html").read_text()
