"""What the documents list is what there is."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("yaml")

from halfway.cli import main
from halfway.lab import methods
from halfway.samplers import SAMPLERS
from halfway.selectors import SELECTORS

DOCS = Path(__file__).parent.parent / "docs"


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
