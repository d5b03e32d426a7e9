"""What several processes report to the one that started them: one mistake costs one run, a full disk ends all."""

from __future__ import annotations

import errno
import pickle
import queue
from typing import Any

import pytest

from halfway.lab.comparison.pool import _next, _told
from halfway.lab.files import DiskFullError


class Dead:
    def is_alive(self) -> bool:
        return False


class Empty:
    def get(self, timeout: float) -> Any:
        raise queue.Empty


def raising(error: Exception) -> Any:
    def ended(_: int) -> str:
        raise error

    return ended


@pytest.mark.parametrize("error", [FileNotFoundError("config.yaml"), KeyError("score"), ValueError("no metrics")])
def test_results_that_cannot_be_read_are_the_failure_of_one_run(error: Exception) -> None:
    told, found = _told(raising(error), 0)
    assert told == ""
    assert found is not None
    assert type(error).__name__ in found
    assert _told(lambda i: f"run {i}", 3) == ("run 3", None)


def test_results_that_cannot_be_written_end_everything() -> None:
    with pytest.raises(OSError, match="read-only"):
        _told(raising(OSError(errno.EROFS, "read-only file system")), 0)


def test_processes_that_died_are_an_error_that_names_their_runs() -> None:
    with pytest.raises(ValueError, match=r"died before these runs ended: b, seed 1; c, seed 0\..*fewer --workers"):
        _next(Empty(), [Dead(), Dead()], {1: "b, seed 1", 2: "c, seed 0"})


def test_a_full_disk_keeps_its_words_on_the_way_between_processes() -> None:
    error = DiskFullError(errno.ENOSPC, "the disk is full", "runs/x/last.pt")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert "runs/x/last.pt" in str(error)
