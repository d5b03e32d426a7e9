"""A server of data sets, and a folder to fetch them to.

What they need is imported by the fixtures, because the tests skip without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.helpers.file_server import FileServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    from halfway.lab.data import download, official
    from tests.helpers.file_server import file_server

    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with file_server() as started:
        monkeypatch.setenv(official.MIRROR, started.address)
        yield started


@pytest.fixture
def cifar(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileServer:
    """A server with a small CIFAR-10, whose checksums are the official ones from now on."""
    from tests.helpers.releases import FOLDER, offer, packed
    from tests.lab.data.test_cifar import python_release

    python_release(tmp_path / "original", monkeypatch)
    offer(server, packed(tmp_path / "original" / FOLDER, FOLDER), monkeypatch)
    return server


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "data"
