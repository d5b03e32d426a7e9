"""Tables for the terminal and for Markdown pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned text: words flush left, numbers flush right."""
    body = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in (header, *body)) for i in range(len(header))]
    right = [i > 0 and all(row[i] in ("", "n/a") or row[i][0].isdigit() for row in body) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *map(line, body)])


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A Markdown table: the first `words` columns flush left, the others flush right."""
    rule = ["---" if i < words else "---:" for i in range(len(header))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))
