"""Settings for the whole suite, and the compatibility matrix: what the tests saw, collected into a table."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from halfway.engine import ops
from tests.helpers import matrix

# One thread per process, also in those that tests start: several tests run side by side, and multi-threaded processes
# that share cores wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

_seen: list[matrix.Row] = []
_ran: list[tuple[str, str, str]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--programs", type=int, default=100, help="random programs in the fuzz test (default 100)")
    parser.addoption("--matrix", type=Path, help="write the table of features that were seen into this page")
    parser.addoption("--zoo-matrix", type=Path, help="write the table of the model zoo into this page")
    parser.addoption("--cuda-matrix", type=Path, help="write the table of what CUDA would run into this page")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _seen.extend(matrix.Row(*value) for name, value in report.user_properties if name == "feature")
        _ran.extend(tuple(value) for name, value in report.user_properties if name == "operation")


def pytest_sessionfinish(session: pytest.Session) -> None:
    for option, write in (
        ("--matrix", lambda page: matrix.write(page, _seen)),
        ("--zoo-matrix", lambda page: matrix.write_zoo(page, _seen)),
        ("--cuda-matrix", lambda page: matrix.write_operations(page, _ran)),
    ):
        page = session.config.getoption(option)
        if page is not None and not hasattr(session.config, "workerinput"):
            write(page)


@pytest.fixture
def feature(record_property: Callable[[str, Any], None]) -> Callable[..., None]:
    """`feature(group, name, stats)` in a test: how it went becomes a row of the matrix, if the test passes."""

    def record(group: str, name: str, outcome: Any, **zoo: str) -> None:
        record_property("feature", tuple(matrix.row(group, name, outcome, **zoo)))

    return record


@pytest.fixture
def cuda_operation(record_property: Callable[[str, Any], None]) -> Callable[..., None]:
    """`cuda_operation(model, operations)` in a test: they become rows of the table of what CUDA would run."""

    def record(model: str, seen: list[Any]) -> None:
        for each in seen:
            record_property("operation", (each.name, ops.traits(each.func).kind, model))

    return record


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Small tensors: threads cost more than they bring, above all with several test processes."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
