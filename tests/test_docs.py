"""What the documents list is what there is."""

from __future__ import annotations

import re

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
