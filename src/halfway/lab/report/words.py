"""What stands below a report's headline."""

from __future__ import annotations

from ..recipes.schema import Recipe


def scale(recipe: Recipe, data: str) -> str:
    """What was trained, on which data, and whether that is a setting of the paper."""
    size = ["reduced scale"] if recipe.paper is None else []
    return " · ".join([recipe.title[:1].upper() + recipe.title[1:], data, *size])
