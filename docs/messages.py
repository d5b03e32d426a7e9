"""Messages of the source, read from its text, with `…` where a value is put in. `troubleshooting.py` prints them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).resolve().parents[1] / "src" / "halfway"
CORE = ("batches", "blocker", "coresets", "costs", "engine", "integrations", "samplers", "selectors", "state")
# Calls whose first argument is a reason to compute instead of replaying.
_REASONS = {"Diverged", "refuse", "release", "drop"}
_WARNINGS = {"warn", "_say"}
HOLE = "…"


class Message(NamedTuple):
    text: str  # as users see it, with holes
    kind: str  # "reason", "warning", the name of an exception, or "other"
    file: str  # within the package


def text_of(node: ast.expr) -> str:
    """The text of a string expression, or "" if it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (text_of(part) if isinstance(part, ast.Constant) else HOLE for part in node.values)
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return (left or HOLE) + (right or HOLE) if left or right else ""
    return ""


def is_sentence(text: str) -> bool:
    return len(text.replace(HOLE, " ").split()) >= 4


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _kinds(tree: ast.Module, reasons_here: bool) -> Iterator[tuple[str, ast.expr]]:
    """Expressions whose role is known."""
    for node in tree.body:
        if reasons_here and isinstance(node, ast.Assign):
            yield "reason", node.value
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            name = _name(node.exc.func)
            yield "reason" if name in _REASONS else name, node.exc.args[0]
        elif isinstance(node, ast.Call) and node.args and _name(node.func) in _REASONS | _WARNINGS:
            yield "reason" if _name(node.func) in _REASONS else "warning", node.args[0]
        elif reasons_here and isinstance(node, ast.Return) and node.value is not None:
            yield "reason", node.value


def _docstrings(tree: ast.Module) -> set[int]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    firsts = (node.body[0] for node in ast.walk(tree) if isinstance(node, owners) and node.body)
    return {id(first.value) for first in firsts if isinstance(first, ast.Expr)}


def messages() -> list[Message]:
    """Every sentence of the core that is no docstring, in the order of files and lines."""
    found: list[Message] = []
    for path in sorted([*SOURCE.glob("*.py"), *(p for room in CORE for p in (SOURCE / room).rglob("*.py"))]):
        tree = ast.parse(path.read_text())
        engine = "engine" in path.relative_to(SOURCE).parts
        kinds = {id(node): kind for kind, node in reversed(list(_kinds(tree, reasons_here=engine)))}
        inner, docs = set[int](), _docstrings(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.expr) or id(node) in inner | docs or not text_of(node):
                continue
            inner |= {id(part) for part in ast.walk(node)} - {id(node)}
            if is_sentence(text_of(node)):
                found.append(Message(text_of(node), kinds.get(id(node), "other"), str(path.relative_to(SOURCE))))
    return found
