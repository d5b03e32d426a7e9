"""What the documents list is what there is."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")

from halfway.lab.cli import main
from halfway.lab.recipes import methods
from halfway.samplers import SAMPLERS
from halfway.selectors import SELECTORS
from tests import ROOT

DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", [n for n in methods.names() if n != "full"])
def test_every_method_has_its_line(name: str) -> None:
    assert f"`{name}`" in (DOCS / "rivals.md").read_text()


def test_the_help_of_train_lists_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    words = capsys.readouterr().out.replace(",", " ").split()
    assert set(methods.names()) <= set(words)


@pytest.mark.parametrize("kind", [*SELECTORS.values(), *SAMPLERS.values()])
def test_every_method_has_a_card(kind: type) -> None:
    card = kind.__doc__ or ""
    for part in ("What:", "Source:", "Cost:", "Caveats:"):
        assert part in card, f"{kind.__name__} does not say {part}"


def test_nobody_is_told_to_install_it_by_name() -> None:
    """It is not on PyPI: whoever owns the name there would be installed."""
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
