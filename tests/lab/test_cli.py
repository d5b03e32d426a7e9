"""The command line itself: what it says about itself, and how it ends when something goes wrong."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from importlib import metadata

import pytest

import halfway
from halfway.lab.cli import main
from halfway.lab.commands import recipes as recipes_command
from tests import ROOT


def test_it_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"halfway {halfway.__version__}\n"
    module = subprocess.run([sys.executable, "-m", "halfway", "--version"], capture_output=True, text=True, check=True)
    assert module.stdout == f"halfway {halfway.__version__}\n"


def test_there_is_one_version() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    stated = re.search(r'^version = "(.*)"$', project, re.MULTILINE)
    assert stated is not None
    assert stated[1] == halfway.__version__ == metadata.version("halfway")


@pytest.mark.parametrize(
    "error", [ValueError("no such thing"), PermissionError(13, "Permission denied", "runs"), TimeoutError("too slow")]
)
def test_what_goes_wrong_is_one_line_that_names_the_command(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(recipes_command, "run", run)
    assert main(["recipes"]) == 2
    assert capsys.readouterr().err == f"halfway recipes: {error}\n"
