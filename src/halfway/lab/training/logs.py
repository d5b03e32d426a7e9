"""Metrics of a run: a line of JSON per round, and the same for TensorBoard."""

from __future__ import annotations

import json
import os
from typing import Any

from .run_folder import RunFolder


class Logs:
    """Writes the metrics of a run from `step` on; without a folder it writes nothing.

    length: bytes of metrics.jsonl so far.
    """

    def __init__(self, folder: RunFolder | None, step: int) -> None:
        self._file: Any = None
        self._board: Any = None
        if folder is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        self._file = open(folder.metrics, "ab")  # noqa: SIM115  closed with the logs
        # Hides what a killed session logged after its last checkpoint.
        self._board = SummaryWriter(str(folder.tensorboard), purge_step=step + 1)

    @property
    def length(self) -> int:
        return self._file.tell() if self._file is not None else 0

    def write(self, metrics: dict[str, Any]) -> None:
        """Write one round, flushed to the disk before the checkpoint that relies on it."""
        if self._file is None:
            return
        self._file.write((json.dumps(metrics) + "\n").encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        for name, value in metrics.items():
            if name != "step":
                self._board.add_scalar(name, value, metrics["step"])
        self._board.flush()

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            try:
                self._file.close()
            finally:
                self._board.close()
