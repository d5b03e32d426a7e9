"""The folder of one run, and what a crash must not destroy.

    config.yaml        the recipe with everything that was set: `halfway train config.yaml` repeats the run
    environment.json   commands, versions, machine, one entry per session
    metrics.jsonl      one line per round (an epoch, or `log_every` steps)
    last.pt            the checkpoint; loads with `weights_only=True`
    tensorboard/       the same metrics for TensorBoard
    held_out.pt        losses of the images that the run leaves out (`data.fold`), see `irreducible.Scoring`

A checkpoint is written to another name, flushed to the disk, then renamed. It holds the length of metrics.jsonl, so
that after a kill the lines of rounds that will be trained again are removed. The first checkpoint is written before the
first round: if there are rounds and no checkpoint, it was lost.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..files import write_json, write_tensors, write_whole
from ..recipes import reading
from ..recipes.schema import Recipe

# What a checkpoint holds, see `Training`; the version changes when that does.
VERSION = 2
_WEIGHTS_AND_STATES = {"model", "optimizer", "policy", "scaler", "blocker", "sampler", "random"}
_COUNTS = {"step", "finished", "batches", "pruned_steps", "retention", "round", "metrics_length"}
KEYS = {"version", *_WEIGHTS_AND_STATES, *_COUNTS}
_INSTEAD = "put the right file back, or remove the folder to train from the start"


class RunFolder:
    """One run's files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "last.pt"
        self.environment = self.path / "environment.json"
        self.tensorboard = self.path / "tensorboard"
        self.held_out = self.path / "held_out.pt"

    def check(self, recipe: Recipe, resume: bool) -> None:
        """Raise unless a run of the recipe may begin, or go on, here. Nothing is written."""
        occupied = self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))
        if occupied and not self.config.exists():
            raise ValueError(f"{self.path} exists and is not a run folder; choose another with --out")
        if occupied and not resume:
            raise ValueError(f"{self.path} holds a run already; go on with --resume, or choose another with --out")
        if occupied:
            self._require_same_recipe(recipe)

    def check_checkpoint(self) -> None:
        """Raise if there are rounds but no checkpoint: going on would start again and drop them."""
        if not self.checkpoint.exists() and self.metrics.exists() and self.metrics.stat().st_size:
            raise ValueError(
                f"{self.checkpoint} is gone, so there is nothing to resume in {self.path}; put it back, remove the "
                "folder to train from the start, or give the right one with --out"
            )

    def open(self, recipe: Recipe, resume: bool) -> None:
        """Make it, or go on with it. A folder that is not empty is never touched without `resume`."""
        self.check(recipe, resume)
        self.check_checkpoint()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{self.path} cannot be made ({error.strerror}); choose another with --out") from error
        write_whole(self.config, "# `halfway train config.yaml` repeats this run.\n" + reading.dump(recipe))

    def _require_same_recipe(self, recipe: Recipe) -> None:
        before, now = reading.load(str(self.config)).identity(), recipe.identity()
        differences = [
            f"{key} was {before.get(key)!r}, is {now.get(key)!r}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]
        if differences:
            raise ValueError(f"{self.path} holds another run ({'; '.join(differences)}); choose another with --out")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing here meanwhile. A killed process loses its lock."""
        from filelock import FileLock, Timeout

        lock = FileLock(self.path / ".lock", blocking=False)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(f"another process is training in {self.path} right now") from None
        try:
            yield
        finally:
            lock.release()

    def save(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint, completely or not at all."""
        write_tensors(self.checkpoint, state)

    def load(self) -> dict[str, Any] | None:
        """The checkpoint, on the CPU; None if there is none yet."""
        if not self.checkpoint.exists():
            return None
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(f"{self.checkpoint} cannot be read ({first_line(error)}); {_INSTEAD}") from error
        version = state.get("version") if isinstance(state, dict) else None
        if isinstance(version, int) and version != VERSION:
            raise ValueError(
                f"{self.checkpoint} has version {version}, and this halfway reads version {VERSION}; go on with the "
                "halfway that wrote it, or remove the folder to train from the start"
            )
        missing = sorted(KEYS - state.keys()) if isinstance(state, dict) else sorted(KEYS)
        if missing:
            raise ValueError(
                f"{self.checkpoint} is no checkpoint of `halfway train` (it has no {missing[0]!r}); {_INSTEAD}"
            )
        return state

    def refused(self, error: Exception) -> str:
        """The error message for a checkpoint that does not belong to this run."""
        return f"{self.checkpoint} does not fit this run ({first_line(error)}); {_INSTEAD}"

    def truncate_metrics(self, length: int) -> None:
        """Remove what was logged after the checkpoint."""
        found = self.metrics.stat().st_size if self.metrics.exists() else 0
        if found < length:
            raise ValueError(
                f"{self.metrics} is shorter than when {self.checkpoint.name} was written, so rounds are missing; "
                f"{_INSTEAD}"
            )
        self.metrics.touch()
        os.truncate(self.metrics, length)

    def read_metrics(self) -> list[dict[str, Any]]:
        """All rounds so far, without a line that a crash or a full disk left half written."""
        if not self.metrics.exists():
            return []
        *whole, _ = self.metrics.read_text().split("\n")
        return [json.loads(line) for line in whole]

    def read_environment(self) -> list[dict[str, Any]]:
        """All sessions so far."""
        return json.loads(self.environment.read_text()) if self.environment.exists() else []

    def note_session(self, session: dict[str, Any]) -> None:
        """Record a session that trains here."""
        write_json(self.environment, [*self.read_environment(), session])


def first_line(error: Exception) -> str:
    """The first line of an error's message; the name of its class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
