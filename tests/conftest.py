"""Settings for the whole suite, and the compatibility matrix: what the tests saw, collected into a table."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import matrix

# One thread per process, also in those that tests start: several tests run side by side, and multi-threaded processes
# that share cores wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

_seen: list[matrix.Row] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--programs", type=int, default=200, help="random programs in the fuzz test (default 200)")
    parser.addoption("--matrix", type=Path, help="write the table of features that were seen into this page")
    parser.addoption("--zoo-matrix", type=Path, help="write the table of the model zoo into this page")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _seen.extend(matrix.Row(*value) for name, value in report.user_properties if name == "feature")


def pytest_sessionfinish(session: pytest.Session) -> None:
    for option, write in (("--matrix", matrix.write), ("--zoo-matrix", matrix.write_zoo)):
        page = session.config.getoption(option)
        if page is not None and not hasattr(session.config, "workerinput"):
            write(page, _seen)


@pytest.fixture
def feature(record_property: Callable[[str, Any], None]) -> Callable[..., None]:
    """`feature(group, name, stats)` in a test: how it went becomes a row of the matrix, if the test passes."""

    def record(group: str, name: str, outcome: Any, **zoo: str) -> None:
        record_property("feature", tuple(matrix.row(group, name, outcome, **zoo)))

    return record


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Small tensors: threads cost more than they bring, above all with several test processes."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
