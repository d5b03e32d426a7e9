"""The folder of one run, and what a crash must not destroy.

    config.yaml        the recipe with everything that was set: `halfway train config.yaml` repeats the run
    environment.json   commands, versions, machine, one entry per session
    metrics.jsonl      one line per round (an epoch, or `log_every` steps)
    last.pt            the checkpoint; loads with `weights_only=True`
    tensorboard/       the same metrics for TensorBoard

A checkpoint is written aside, flushed to the disk, then renamed. It knows how long metrics.jsonl was, so that after a
kill the lines of rounds that will be trained again are taken back.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import recipe as recipes
from .files import write_json, write_tensors, write_whole
from .methods import IMPLEMENTATIONS
from .recipe import Recipe

_MAY_DIFFER = {"root", "paper", "title"}


class RunFolder:
    """One run's files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "last.pt"
        self.environment = self.path / "environment.json"
        self.tensorboard = self.path / "tensorboard"

    def check(self, recipe: Recipe, resume: bool) -> None:
        """Raise unless a run of the recipe may begin, or go on, here. Nothing is written."""
        occupied = self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))
        if occupied and not self.config.exists():
            raise ValueError(f"{self.path} exists and is not a run folder; choose another with --out")
        if occupied and not resume:
            raise ValueError(f"{self.path} holds a run already; go on with --resume, or choose another with --out")
        if occupied:
            self._refuse_another(recipe)

    def open(self, recipe: Recipe, resume: bool) -> None:
        """Make it, or go on with it. A folder that is not empty is never touched without `resume`."""
        self.check(recipe, resume)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{self.path} cannot be made ({error.strerror}); choose another with --out") from error
        write_whole(self.config, "# `halfway train config.yaml` repeats this run.\n" + recipes.dump(recipe))

    def _refuse_another(self, recipe: Recipe) -> None:
        before, now = recipes.load(str(self.config)).as_dict(), recipe.as_dict()
        before["data"].pop("workers", None)
        now["data"].pop("workers", None)
        # Settings of methods that are not the run's own are not looked at.
        used = recipe.pruning.implementation if recipe.pruning is not None else None
        unused = {name for name in IMPLEMENTATIONS if name != used}
        differences = [
            f"{key} was {before.get(key)!r}, is {now.get(key)!r}"
            for key in sorted(before.keys() | now.keys())
            if key not in _MAY_DIFFER | unused and before.get(key) != now.get(key)
        ]
        if differences:
            raise ValueError(f"{self.path} holds another run ({'; '.join(differences)}); choose another with --out")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else writes here meanwhile. The lock of a process that was killed is gone."""
        try:
            import fcntl
        except ModuleNotFoundError:  # not on this system
            yield
            return
        with open(self.path / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"another process is training in {self.path} right now") from None
            yield

    def save(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint, whole or not at all."""
        write_tensors(self.checkpoint, state)

    def load(self) -> dict[str, Any] | None:
        """The checkpoint, on the CPU; None if there is none yet."""
        if not self.checkpoint.exists():
            return None
        try:
            return torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(f"{self.checkpoint} cannot be read ({error}); remove it to train again") from error

    def truncate_metrics(self, length: int) -> None:
        """Take back what was logged after the checkpoint."""
        if not self.metrics.exists():
            self.metrics.touch()
        with open(self.metrics, "r+b") as file:
            if file.seek(0, os.SEEK_END) < length:
                raise ValueError(f"{self.metrics} is shorter than when {self.checkpoint.name} was written")
            file.truncate(length)

    def read_metrics(self) -> list[dict[str, Any]]:
        """All rounds so far."""
        if not self.metrics.exists():
            return []
        return [json.loads(line) for line in self.metrics.read_text().splitlines()]

    def read_environment(self) -> list[dict[str, Any]]:
        """All sessions so far."""
        return json.loads(self.environment.read_text()) if self.environment.exists() else []

    def note_session(self, session: dict[str, Any]) -> None:
        """One more session that trains here."""
        write_json(self.environment, [*self.read_environment(), session])
