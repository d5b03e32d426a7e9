"""The rooms of the package stay small enough to be read. Which may import which is a contract of `make lint`."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

from tests import ROOT

PACKAGE = ROOT / "src" / "halfway"
FILES = 12  # beside the folders, `__init__.py` and `py.typed` included
# Lines of code, without comments, docstrings and blank lines. A room that needs more should give something up first.
BUDGETS = {
    "advice": 1_085,
    "batches": 445,
    "blocker": 600,
    "coresets": 1_330,
    "costs": 320,
    "engine": 2_935,
    "integrations": 350,
    "lab": 9_880,
    "loading": 515,
    "samplers": 640,
    "selectors": 2_020,
    "state": 555,
}
TOGETHER = 2_000  # blocker and engine: what has to be read to trust a replay

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def docstring_lines(text: str) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def code_lines(text: str) -> int:
    """Lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(text))


def size(room: str) -> int:
    return sum(code_lines(path.read_text()) for path in (PACKAGE / room).rglob("*.py"))


def rooms() -> list[Path]:
    return sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))


def test_only_code_is_counted() -> None:
    text = (
        '"""What\nit is."""\n\n# why\nx = (\n    1,  # one\n)\n\n\ndef f():\n    """Says."""\n    return """a\nb"""\n'
    )
    assert code_lines(text) == 6


def test_few_files_stand_beside_the_folders() -> None:
    files = [path.name for path in PACKAGE.iterdir() if path.is_file()]
    assert len(files) <= FILES, sorted(files)


def test_every_room_has_a_budget_and_says_where_to_begin() -> None:
    assert [room.name for room in rooms()] == sorted(BUDGETS)
    for room in rooms():
        docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
        assert "begin" in docstring.lower(), f"{room.name} does not say where to begin reading"


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_keeps_to_its_budget(room: str) -> None:
    assert size(room) <= BUDGETS[room]


@pytest.mark.xfail(reason="they hold some 3,500; lower the two budgets above as they shrink", strict=False)
def test_blocker_and_engine_can_be_read_together() -> None:
    assert size("blocker") + size("engine") < TOGETHER
