"""Which samples and classes were retained: the counts of a group's runs, summed over seeds.

Shapes: N training samples, C classes, R rounds of training.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..training.run_folder import RunFolder


@dataclass(frozen=True)
class Counts:
    """Over all seeds of a group.

    offered, retained: (N,) how often a sample was in a pruned batch, and how often it stayed.
    class_offered, class_retained: (R, C) the same by round and class; (0, 0) where classes are unknown.
    """

    offered: Tensor
    retained: Tensor
    class_offered: Tensor
    class_retained: Tensor

    @property
    def share(self) -> float:
        """The share of samples in pruned batches that were retained."""
        return float(self.retained.sum() / self.offered.sum().clamp(min=1))

    @property
    def offers(self) -> int:
        """How often a sample was in a pruned batch: the median of those that ever were."""
        seen = self.offered[self.offered > 0]
        return int(seen.median()) if len(seen) else 0

    @property
    def rates(self) -> Tensor:
        """(N,) retention rate of each sample; NaN for one that was never in a pruned batch."""
        return self.retained / self.offered

    @property
    def class_rates(self) -> Tensor:
        """(C,) retention rate of each class over the whole training; NaN if it never occurred."""
        return self.class_retained.sum(0) / self.class_offered.sum(0)

    def class_rates_over_time(self, at_most: int) -> tuple[Tensor, Tensor]:
        """Rates (T, C) in T <= `at_most` stretches of training that pruned, and each stretch's first and last round
        (T, 2), counted from 1."""
        pruned = self.class_offered.sum(1).nonzero().flatten()
        stretches = [s for s in pruned.tensor_split(min(at_most, max(len(pruned), 1))) if len(s)]
        rates = [self.class_retained[s].sum(0) / self.class_offered[s].sum(0) for s in stretches]
        rounds = [(int(s[0]) + 1, int(s[-1]) + 1) for s in stretches]
        classes = self.class_offered.shape[1]
        return (torch.stack(rates) if rates else torch.zeros(0, classes)), torch.tensor(rounds).reshape(-1, 2)

    def extremes(self, count: int) -> tuple[list[int], list[int]]:
        """The samples pruned most often, and those retained most often; at equal rates those offered more often."""
        seen = self.offered.nonzero().flatten()
        rates, offered = self.rates[seen].double(), self.offered[seen].double()
        # Far smaller than the difference between any two rates, so that it only decides between equal ones.
        nudge = offered / (1 + offered.max()) / (2 * offered.max() ** 2) if len(seen) else offered
        pruned = seen[(rates - nudge).argsort(stable=True)][:count]
        retained = seen[(-rates - nudge).argsort(stable=True)][:count]
        return pruned.tolist(), retained.tolist()


def read(paths: Iterable[Path]) -> Counts | None:
    """The counts of a group's runs; None if a run's checkpoint is gone, or nothing was pruned."""
    states = []
    for path in paths:
        state = RunFolder(path).load()
        if state is None:
            return None
        states.append(state["retention"])
    counts = add(states)
    return counts if int(counts.offered.sum()) else None


def add(states: list[dict[str, Any]]) -> Counts:
    """The counts of several `Retention.state_dict()`s, summed."""
    offered = torch.stack([s["offered"] for s in states]).sum(0)
    retained = torch.stack([s["retained"] for s in states]).sum(0)
    return Counts(offered, retained, _rounds(states, "class_offered"), _rounds(states, "class_retained"))


def _rounds(states: list[dict[str, Any]], key: str) -> Tensor:
    if not all(s[key] for s in states):
        return torch.zeros(0, 0, dtype=torch.int64)
    return torch.stack([torch.stack(list(s[key])) for s in states]).sum(0)
