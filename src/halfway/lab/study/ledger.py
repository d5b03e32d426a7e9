"""The results of a study: a file of one JSON object per line, one line per run, in the order in which they ended.

Lines are only ever appended. A line that was cut short by a crash is no result: it is reported, and its run is done
again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..training.run_result import RunResult
from .plan import Run

# Of each round.
_CURVE = ("epoch", "score", "test_loss", "small_losses", "loss")


def record(run: Run, result: RunResult) -> dict[str, Any]:
    """A finished run as a line of the ledger."""
    last, session = result.metrics[-1], result.sessions[-1]
    given = {key: last.get(key) for key in ("test_loss", "training_score", "training_loss", "training_small_losses")}
    return {
        "key": run.key,
        "stage": run.stage,
        "recipe": run.base,
        "arm": run.arm,
        "method": result.method,
        "seed": run.seed,
        "evaluated_on": run.recipe.data.evaluate,
        "score": result.score,
        **given,
        "cost": result.cost,
        "pruned": result.effective_ratio[1],
        "chosen_by_density": result.chosen_by_density,
        "replayed": last.get("replayed"),
        "recomputed": last.get("recomputed"),
        "curve": [[_rounded(m.get(key)) for key in _CURVE] for m in result.metrics],
        "date": session["date"],
        "versions": session["versions"],
        "machine": session["machine"],
    }


def last_small_losses(entry: Mapping[str, Any]) -> float | None:
    """The share of plain losses below 0.1 in the last round of a run."""
    curve = entry.get("curve")
    return curve[-1][_CURVE.index("small_losses")] if curve else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def read(path: Path) -> list[dict[str, Any]]:
    """All results; of equal runs the first counts."""
    if not path.exists():
        return []
    found: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            entry = json.loads(line)
            found.setdefault(entry["key"], entry)
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(
                f"{path}, line {number} is not a result: delete that line, its run is done again"
            ) from None
    return list(found.values())


def append(path: Path, entry: dict[str, Any]) -> None:
    """Add a result; it is on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())
