"""The compatibility matrix: written from the tests that ran, never by hand (`make matrix`)."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from halfway import Stats, __version__

_BEGIN, _END = "<!-- matrix: written by `make matrix` -->", "<!-- end of the matrix -->"
_LIBRARIES = ("torchvision", "timm", "transformers", "accelerate", "lightning", "torchdata")
# Why the first step of the usual mixed-precision loop is computed.
_ONCE = "the first call of the model showed that it runs under autocast"


class Row(NamedTuple):
    group: str
    name: str
    outcome: str
    why: str


def row(group: str, name: str, outcome: Stats | BaseException | tuple[int, dict[str, int]]) -> Row:
    """What was seen: the statistics of a training, or the error that refused it."""
    if isinstance(outcome, BaseException):
        return Row(group, name, "not supported", str(outcome).split(";")[0].splitlines()[0])
    replayed, reasons = (outcome.steps_replayed, outcome.recompute_reasons) if isinstance(outcome, Stats) else outcome
    lasting = [reason for reason in reasons if reason != _ONCE]
    if replayed and not lasting:
        return Row(group, name, "replay", "from the second step on" if reasons else "")
    if replayed:
        return Row(group, name, "replay", f"but where {lasting[0]}")
    return Row(group, name, "recompute", lasting[0].split(" (")[0] if lasting else "")


def table(rows: Iterable[Row]) -> str:
    lines = ["| | feature | | why |", "|---|---|---|---|"]
    last = ""
    for r in sorted(set(rows)):
        lines.append(f"| {r.group if r.group != last else ''} | {r.name} | {r.outcome} | {r.why} |")
        last = r.group
    return "\n".join(lines)


def versions() -> str:
    found: list[Any] = [f"halfway {__version__}", f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for library in _LIBRARIES:
        try:
            found.append(f"{library} {metadata.version(library)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def write(page: Path, rows: list[Row]) -> None:
    """Replace what lies between the two marks."""
    text = page.read_text()
    if _BEGIN not in text or _END not in text:
        raise ValueError(f"{page} has no place for the matrix, which goes between {_BEGIN!r} and {_END!r}")
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    body = f"{_BEGIN}\n\nSeen with {versions()}, on a CPU.\n\n{table(rows)}\n\n{_END}"
    page.write_text(before + body + after)
