"""The command line: `halfway demo | layers | bench`. Each command lives in its own module of `lab`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

_COMMANDS = ("demo", "layers", "bench")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. A mistake in the input is one line on stderr, not a traceback."""
    parser = argparse.ArgumentParser(
        prog="halfway",
        description="Partial Forward Blocking for PyTorch: drop redundant samples in the middle of the forward pass.",
        epilog="Start with `halfway demo`; then `halfway layers resnet50` shows what each cut of a model would save.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in _COMMANDS:
        importlib.import_module(f"halfway.lab.{name}_command").register(commands)
    parsed = parser.parse_args(arguments)
    try:
        code = int(parsed.run(parsed) or 0)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `halfway layers resnet50 | head`: whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, TypeError, FileNotFoundError, ModuleNotFoundError) as error:
        print(f"halfway {parsed.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
