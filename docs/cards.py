"""Cards in the API reference: the lines "What:", "Source:", "Cost:" and "Caveats:" of a docstring as paragraphs."""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

_LINE = re.compile(r"^(What|Source|Cost|Caveats):", re.MULTILINE)


def paragraphs(docstring: str) -> str:
    """The docstring with one paragraph for each line of its card."""
    text = inspect.cleandoc(docstring)
    if not _LINE.search(text):
        return docstring
    head, _, settings = text.partition("\n\nArgs:")
    # What continues a line of the card is indented, which would be read as a block of its own.
    head = re.sub(r"\n +", " ", head)
    head = _LINE.sub(r"\n**\1.**", head)
    return f"{head}\n\nArgs:{settings}" if settings else head


class Cards(griffe.Extension):
    """Rewrites the docstrings of classes as they are read."""

    def on_class_instance(self, *, cls: Any, **kwargs: Any) -> None:
        if cls.docstring is not None:
            cls.docstring.value = paragraphs(cls.docstring.value)
