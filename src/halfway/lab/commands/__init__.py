"""The command line, a file per command: `halfway train` is `train`."""

from __future__ import annotations

import argparse
from typing import Any


def add_command(
    commands: Any, name: str, about: str, description: str, epilog: str | None = None
) -> argparse.ArgumentParser:
    """The parser of a command, whose texts keep their lines. about: in the list of all commands."""
    return commands.add_parser(
        name,
        help=about,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
