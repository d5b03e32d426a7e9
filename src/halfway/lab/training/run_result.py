"""A finished (or unfinished) run, read from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..recipes import reading
from ..recipes.methods import FULL
from ..recipes.schema import Recipe
from .run_folder import RunFolder


@dataclass(frozen=True)
class RunResult:
    """What a run measured. Costs are relative to training on all samples.

    metrics: a dict per round, see `Training`.
    sessions: commands, versions and machine.
    """

    path: Path
    recipe: Recipe
    metrics: list[dict[str, Any]]
    sessions: list[dict[str, Any]]
    steps: int

    @classmethod
    def read(cls, path: Path) -> RunResult:
        folder = RunFolder(path)
        if not folder.config.exists():
            raise FileNotFoundError(f"{path} is not a run folder (it has no config.yaml)")
        sessions = folder.read_environment()
        steps = sessions[-1]["steps"] if sessions else 0
        return cls(path, reading.load(str(folder.config)), folder.read_metrics(), sessions, steps)

    @property
    def finished(self) -> bool:
        return bool(self.metrics) and self.metrics[-1]["step"] == self.steps

    @property
    def score(self) -> float:
        """The score after the last round, in percent; at several scales if the recipe says so."""
        last = self.metrics[-1]
        return last.get("multi_scale", last["score"])

    @property
    def method(self) -> str:
        return self.recipe.method if self.recipe.prunes else FULL

    @property
    def effective_ratio(self) -> tuple[float, float]:
        """The share of samples pruned: in pruned steps, and in the whole run."""
        pruned = self._last["seen"] - self._last["retained"]
        return (pruned / self._offered if self._offered else 0.0, pruned / self._last["seen"])

    @property
    def flops(self) -> tuple[float, float]:
        """The cost of a pruned step, and of the run; of the steps taken, where those are fewer than full data take."""
        seen, spent = self._last["seen"], self._last["spent"]
        step = (spent - (seen - self._offered)) / self._offered if self._offered else 1.0
        return step, spent / seen

    @property
    def chosen_by_density(self) -> float | None:
        """How much of the choice the density made, and not the noise, see `Density.diagnostics`: since the run began or
        was last resumed. None for other methods, and for runs that do not say."""
        return next((m["chosen_by_density"] for m in reversed(self.metrics) if "chosen_by_density" in m), None)

    @property
    def full_samples(self) -> int:
        """Samples that full data for all epochs of the recipe take."""
        # Older runs take as many steps as full data, and do not write their number down.
        full_steps: int = self.sessions[-1].get("full_steps", self.steps) if self.sessions else self.steps
        return full_steps * self.recipe.batch_size

    @property
    def cost(self) -> float:
        """The cost of the run."""
        return self._last["spent"] / max(self.full_samples, self._last["seen"])

    @property
    def seconds(self) -> float:
        """Training time, without evaluation and checkpoints."""
        return sum(m["seconds"] for m in self.metrics)

    @property
    def waited(self) -> float:
        """The share of `seconds` spent waiting for data."""
        return sum(m["waited"] for m in self.metrics) / self.seconds

    @cached_property
    def _last(self) -> dict[str, Any]:
        return self.metrics[-1]

    @property
    def _offered(self) -> int:
        """The number of samples in pruned steps."""
        return self._last["pruned_steps"] * self.recipe.batch_size
