"""The compatibility matrix says what was seen, and the page keeps the rest of its text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from halfway import Density, ForwardBlocker

from .helpers import matrix


def test_rows_say_what_the_statistics_say() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    blocker = ForwardBlocker(model, "0", 0.5, selector=Density(num_centroids=2), reuse="recompute")
    model(blocker(torch.randn(8, 4)))
    assert matrix.row("g", "n", blocker.stats) == matrix.Row("g", "n", "recompute", 'reuse="recompute"')
    assert matrix.row("g", "n", (3, {})) == matrix.Row("g", "n", "replay", "")
    once = "the first call of the model showed that it runs under autocast"
    assert matrix.row("g", "n", (3, {once: 1})) == matrix.Row("g", "n", "replay", "from the second step on")
    assert matrix.row("g", "n", (3, {"it moved": 1})) == matrix.Row("g", "n", "replay", "but where it moved")
    blocker = ForwardBlocker(nn.Linear(4, 2), None, 0.5, selector="random")
    blocker(torch.randn(8, 4))
    assert matrix.row("g", "n", blocker.stats) == matrix.Row("g", "n", "works", "decided before the model runs")
    refused = matrix.row("g", "n", TypeError("no; do that instead"))
    assert refused == matrix.Row("g", "n", "not supported", "no")


def test_only_the_matrix_of_a_page_is_written_anew(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{matrix._BEGIN}\nold\n{matrix._END}\nafter\n")
    for _ in range(2):
        matrix.write(page, [matrix.Row("b", "x", "replay", ""), matrix.Row("a", "y", "recompute", "why")] * 2)
    text = page.read_text()
    assert text.startswith(f"before\n{matrix._BEGIN}\n")
    assert text.endswith(f"{matrix._END}\nafter\n")
    assert "old" not in text
    assert text.index("| a | y | recompute | why |") < text.index("| b | x | replay |  |")
    assert f"torch {torch.__version__}" in text


def test_selectors_in_trainers_have_a_table_of_their_own() -> None:
    rows = [
        matrix.Row("selector in B", "rotate", "works", ""),
        matrix.Row("selector in A", "loss", "replay", ""),
        matrix.Row("selector in B", "loss", "replay", ""),
    ]
    assert matrix.grid(rows).splitlines() == [
        "|  | A | B |",
        "| --- | --- | --- |",
        "| `loss` | replay | replay |",
        "| `rotate` |  | works |",
    ]
    assert "selector" not in matrix.table(rows)


def test_the_zoo_has_a_table_of_its_own_that_the_matrix_leaves_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        f"{matrix._BEGIN}\n{matrix._END}\nbetween\n{matrix._ZOO_BEGIN}\n{matrix._ZOO_END}\nafter\n",
    )
    seen = matrix.row(matrix.ZOO + "timm", "resnet10t", (3, {}), cut="layer1", operations="9 / 0", error="2e-07")
    rows = [seen, matrix.Row("a", "y", "recompute", "why")]
    line = "| timm | resnet10t | `layer1` | replay | 9 / 0 | 2e-07 |  |"
    matrix.write_zoo(page, rows)
    text = page.read_text()
    assert text.count(line) == 1
    assert "| a | y |" not in text
    matrix.write(page, rows)
    text = page.read_text()
    assert text.count("resnet10t") == 1
    assert text.index("| a | y | recompute | why |") < text.index("between") < text.index(line)
    assert text.endswith(f"{matrix._ZOO_END}\nafter\n")


def test_a_page_without_a_place_for_it_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no place\n")
    with pytest.raises(ValueError, match="no place for the matrix"):
        matrix.write(page, [])
    with pytest.raises(ValueError, match="zoo-matrix"):
        matrix.write_zoo(page, [])
