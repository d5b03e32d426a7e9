"""Cells of tables that can be sorted."""

from __future__ import annotations

import re


def first_number(cell: str) -> str:
    """What a cell sorts by: the number it begins with, after a sign such as ≤; nothing if there is none."""
    found = re.match(r"[≤≥]?\s*([+-]?\d+(\.\d+)?)", cell)
    return found[1] if found else ""
