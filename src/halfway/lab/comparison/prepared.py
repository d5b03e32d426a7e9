"""What methods cost before their runs begin: the file of irreducible losses that `rho` and `rho_remembered` read."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..recipes.predicted_cost import sample_flops
from ..training.irreducible import read_cost
from ..training.run_result import RunResult
from .trials import Group


@dataclass(frozen=True)
class Prepared:
    """A file that the runs of a group share.

    cost: in runs on full data; None if the file is gone, or does not say.
    pays_after: the fewest runs of the group that, with the file, cost no more than as many runs on full data; None if
        there is no such number, or the cost is not known.
    """

    label: str
    file: str
    cost: float | None
    pays_after: int | None

    def __str__(self) -> str:
        if self.cost is None:
            return f"{self.label}: what {self.file} cost is not known, and not in the FLOPs."
        pays = "it never pays" if self.pays_after is None else f"it pays when {self.pays_after} runs share it"
        return (
            f"{self.label}: {self.file} cost as much as {self.cost:.2f} runs on full data, once, which is not in the "
            f"FLOPs; {pays}."
        )


def prepared(results: Mapping[Group, Mapping[int, RunResult]]) -> list[Prepared]:
    """The files that the groups' methods read."""
    found = []
    for group, runs in results.items():
        first = next(iter(runs.values()))
        file = first.recipe.method_settings.get("losses")
        if not isinstance(file, str):
            continue
        full = first.steps * first.recipe.batch_size  # samples of a run on full data
        flops = read_cost(Path(file))
        cost = None if flops is None else flops / (full * sample_flops(first.recipe).step)
        saved = 1 - statistics.fmean(run.metrics[-1]["spent"] for run in runs.values()) / full
        pays_after = None if cost is None or saved <= 0 else max(1, math.ceil(cost / saved))
        found.append(Prepared(group.label, file, cost, pays_after))
    return found
