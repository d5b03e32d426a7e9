"""What methods cost before their runs begin: the file of irreducible losses that `rho` and `rho_remembered` read, and
the proxies of methods that decide once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..coresets.chosen import read
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
    keep: the share of the images that a method which decides once retains; None for other methods.
    run: what a run costs without the file, in runs on full data.
    proxies: the set of trainings that a subset was chosen from; empty: none.
    """

    label: str
    file: str
    cost: float | None
    pays_after: int | None
    keep: float | None = None
    run: float = 0.0
    proxies: str = ""

    @property
    def together(self) -> float | None:
        """What one run costs with all that it needs."""
        return None if self.cost is None else self.run + self.cost

    def __str__(self) -> str:
        if self.cost is None:
            return f"{self.label}: what {self.file} cost is not known, and not in the FLOPs."
        shared = "" if self.pays_after == 1 else f" when {self.pays_after} runs share it"
        pays = "never cheaper than full data" if self.pays_after is None else f"cheaper than full data{shared}"
        if self.keep is not None:
            first = f"{self.label}: keeps {self.keep:.3g} of the images; a run cost {self.run:.3f} of one on full data"
            if not self.proxies:
                return f"{first}, and the choice needs no proxy."
            return f"{first}, with its proxies ({self.proxies}) {self.together:.3f}; {pays}."
        return (
            f"{self.label}: {self.file} cost as much as {self.cost:.2f} runs on full data, once, which is not in the "
            f"FLOPs; {pays}."
        )


def prepared(results: Mapping[Group, Mapping[int, RunResult]]) -> list[Prepared]:
    """The files that the groups' methods read."""
    found = []
    for group, runs in results.items():
        first = next(iter(runs.values()))
        coreset = first.recipe.coreset.file if first.recipe.chosen_once else None
        file = coreset or first.recipe.method_settings.get("losses")
        if not isinstance(file, str):
            continue
        full = first.full_samples  # of a run on full data
        subset = None if coreset is None else read(Path(coreset))
        flops = read_cost(Path(file)) if coreset is None else None if subset is None else subset.cost.get("flops")
        cost = None if flops is None else flops / (full * sample_flops(first.recipe).step)
        spent = statistics.fmean(run.metrics[-1]["spent"] for run in runs.values()) / full
        pays_after = None if cost is None or spent >= 1 else max(1, math.ceil(cost / (1 - spent)))
        keep, proxies = (None, "") if subset is None else (len(subset) / subset.num_samples, subset.cost.get("set", ""))
        found.append(Prepared(group.label, file, cost, pays_after, keep, spent, proxies))
    return found


def shared(results: Mapping[Group, Mapping[int, RunResult]]) -> list[str]:
    """What each set of proxies cost, once, and who shares it."""
    sets: dict[str, list[Prepared]] = {}
    for each in prepared(results):
        if each.proxies:
            sets.setdefault(each.proxies, []).append(each)
    return [
        f"Proxies {name}: as much as {max(each.cost or 0.0 for each in users):.2f} runs on full data, once, for "
        f"{'; '.join(each.label for each in users)}."
        for name, users in sets.items()
    ]
