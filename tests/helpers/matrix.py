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
_ZOO_BEGIN, _ZOO_END = "<!-- zoo: written by `make zoo-matrix` -->", "<!-- end of the zoo -->"
_CUDA_BEGIN, _CUDA_END = "<!-- operations: written by `make cuda-matrix` -->", "<!-- end of the operations -->"
# So many models are named beside an operation.
_NAMED = 5
_GRID = (
    "Every selector in every trainer, with the ids it needs and the losses it learns from. *replay*: as above; "
    "*works*: it decides before the model runs, so there is nothing to replay."
)
_LIBRARIES = (
    "torchvision",
    "timm",
    "segmentation_models_pytorch",
    "transformers",
    "accelerate",
    "lightning",
    "torchdata",
)
# Groups that begin so are columns of a table of their own, with a row for each selector.
SELECTOR_IN = "selector in "
# Groups that begin so are in the table of the zoo, which is written by a command of its own.
ZOO = "model zoo: "
# Why the first step of the usual mixed-precision loop is computed.
_ONCE = "the first call of the model showed that it runs under autocast"


class Row(NamedTuple):
    group: str
    name: str
    outcome: str
    why: str
    # Of the zoo only.
    cut: str = ""
    operations: str = ""
    error: str = ""


def row(group: str, name: str, outcome: Stats | BaseException | tuple[int, dict[str, int]], **zoo: str) -> Row:
    """What was seen: the statistics of a training, or the error that refused it."""
    return _row(group, name, outcome)._replace(**zoo)


def _row(group: str, name: str, outcome: Stats | BaseException | tuple[int, dict[str, int]]) -> Row:
    if isinstance(outcome, BaseException):
        return Row(group, name, "not supported", str(outcome).split(";")[0].splitlines()[0])
    replayed, reasons = (outcome.steps_replayed, outcome.recompute_reasons) if isinstance(outcome, Stats) else outcome
    if isinstance(outcome, Stats) and outcome.pruned_steps and not (replayed or reasons):
        return Row(group, name, "works", "decided before the model runs")
    lasting = [reason for reason in reasons if reason != _ONCE]
    if replayed and not lasting:
        return Row(group, name, "replay", "from the second step on" if reasons else "")
    if replayed:
        return Row(group, name, "replay", f"but where {lasting[0]}")
    return Row(group, name, "recompute", lasting[0].split(" (")[0] if lasting else "")


def table(rows: Iterable[Row]) -> str:
    lines = ["| | feature | | why |", "|---|---|---|---|"]
    last = ""
    for r in sorted(r for r in set(rows) if not r.group.startswith((SELECTOR_IN, ZOO))):
        lines.append(f"| {r.group if r.group != last else ''} | {r.name} | {r.outcome} | {r.why} |")
        last = r.group
    return "\n".join(lines)


def grid(rows: Iterable[Row]) -> str:
    """Selectors in trainers."""
    cells = {(r.name, r.group.removeprefix(SELECTOR_IN)): r.outcome for r in rows if r.group.startswith(SELECTOR_IN)}
    trainers = sorted({trainer for _, trainer in cells})
    lines = [_line("", trainers), _line("---", ["---"] * len(trainers))]
    lines += [
        _line(f"`{name}`", [cells.get((name, t), "") for t in trainers]) for name in sorted({n for n, _ in cells})
    ]
    return "\n".join(lines)


def zoo(rows: Iterable[Row]) -> str:
    """Models, with how much of their shallow part was replayed and how far the gradients were off."""
    lines = [_line("", ["model", "cut", "", "operations", "error", "why"]), "|---|---|---|---|---:|---:|---|"]
    last = ""
    for r in sorted(r for r in set(rows) if r.group.startswith(ZOO)):
        library = r.group.removeprefix(ZOO) if r.group != last else ""
        lines.append(_line(library, [r.name, f"`{r.cut}`", r.outcome, r.operations, r.error, r.why]))
        last = r.group
    return "\n".join(lines)


def operations(seen: Iterable[tuple[str, str, str]]) -> str:
    """(operation, kind, model) that ran on fake CUDA tensors, as a table."""
    models: dict[tuple[str, str], list[str]] = {}
    for name, kind, model in sorted(set(seen)):
        models.setdefault((kind, name), []).append(model)
    lines = ["| operation | kind | models |", "|---|---|---|"]
    for (kind, name), of in sorted(models.items()):
        more = f" and {len(of) - _NAMED} more" if len(of) > _NAMED else ""
        lines.append(f"| `{name}` | {kind} | {', '.join(of[:_NAMED])}{more} |")
    return "\n".join(lines)


def _line(name: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([name, *cells])} |"


def versions() -> str:
    found: list[Any] = [f"halfway {__version__}", f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for library in _LIBRARIES:
        try:
            found.append(f"{library} {metadata.version(library)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def write(page: Path, rows: list[Row]) -> None:
    """Replace the matrix in the page, and nothing else."""
    _replace(page, _BEGIN, _END, f"{table(rows)}\n\n{_GRID}\n\n{grid(rows)}")


def write_zoo(page: Path, rows: list[Row]) -> None:
    """Replace the table of the zoo in the page, and nothing else."""
    _replace(page, _ZOO_BEGIN, _ZOO_END, zoo(rows))


def write_operations(page: Path, seen: list[tuple[str, str, str]]) -> None:
    """Replace the table of what CUDA would run in the page, and nothing else."""
    _replace(page, _CUDA_BEGIN, _CUDA_END, operations(seen), "fake CUDA tensors")


def _replace(page: Path, begin: str, end: str, body: str, on: str = "a CPU") -> None:
    text = page.read_text()
    if begin not in text or end not in text:
        raise ValueError(f"{page} has no place for the matrix, which goes between {begin!r} and {end!r}")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n\nSeen with {versions()}, on {on}.\n\n{body}\n\n{end}{after}")
