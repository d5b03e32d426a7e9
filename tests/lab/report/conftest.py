"""Runs to report on, trained once for all tests here, and the page about one comparison.

The helpers are imported by the fixtures, because they need packages that the tests skip without.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """full, random and pfb at two ratios and two seeds; one run more that was never finished; a timing."""
    from tests.helpers import reports

    return reports.compare(tmp_path_factory.mktemp("runs") / "compared")


@pytest.fixture(scope="session")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """full, random and pfb at three values of a setting."""
    from tests.helpers import reports

    return reports.sweep(tmp_path_factory.mktemp("runs") / "swept")


@pytest.fixture(scope="session")
def segmented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run that counts steps, whose samples have several classes each."""
    from tests.helpers import reports

    return reports.segment(tmp_path_factory.mktemp("runs") / "voc")


@pytest.fixture(scope="session")
def written(compared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page about `compared`."""
    from tests.helpers import reports

    out = tmp_path_factory.mktemp("pages") / "compared.html"
    assert reports.write(compared, "--out", out) == 0
    return out


@pytest.fixture(scope="session")
def text(written: Path) -> str:
    """Its words."""
    from tests.helpers import reports

    return reports.plain(written)
