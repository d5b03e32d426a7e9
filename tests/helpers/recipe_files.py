"""Recipes in files."""

from pathlib import Path


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)
