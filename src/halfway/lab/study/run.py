"""The runs of a study, in several processes.

A run folder exists while its run is under way, so that an interrupted one goes on; its results become a line of the
ledger, and only then the folder is deleted.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from ..comparison import pool
from ..training.run_result import RunResult
from . import ledger
from .plan import Run


def todo(runs: Sequence[Run], results: Path) -> list[Run]:
    """Those that are not in the ledger yet, each once."""
    known = {entry["key"] for entry in ledger.read(results)}
    return list({run.key: run for run in runs if run.key not in known}.values())


def carry_out(runs: Sequence[Run], folder: Path, results: Path, workers: int, command: str) -> int:
    """Train all runs; returns how many failed. An error of one run does not stop the others.

    Args:
        folder: of the run folders.
        results: the ledger.
        workers: processes.
        command: kept with the results.
    """
    jobs = [pool.Job(run.recipe, folder / run.key, run.label) for run in runs]

    def ended(position: int) -> str:
        entry = ledger.record(runs[position], RunResult.read(jobs[position].folder))
        ledger.append(results, entry)
        shutil.rmtree(jobs[position].folder, ignore_errors=True)
        return f"{entry['score']:.2f} %"

    return pool.train(jobs, workers, command, ended)
