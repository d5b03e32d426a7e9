"""The command line, `halfway COMMAND`. Each command is a module of `commands`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from .. import __version__

_COMMANDS = (
    "demo",
    "layers",
    "bench",
    "advise",
    "recipes",
    "data",
    "train",
    "irreducible",
    "coreset",
    "compare",
    "study",
    "report",
)

# The packages of the extra `lab`, by their import names.
_LAB = {
    "filelock",
    "jinja2",
    "matplotlib",
    "numpy",
    "PIL",
    "scipy",
    "sklearn",
    "tensorboard",
    "timm",
    "torchmetrics",
    "torchvision",
    "tqdm",
    "yaml",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. A mistake in the input is one line on stderr, not a traceback."""
    parser = argparse.ArgumentParser(
        prog="halfway",
        description="Partial Forward Blocking for PyTorch: drop redundant samples in the middle of the forward pass.",
        epilog="Start with `halfway demo`; then `halfway layers resnet50` shows what each cut of a model would save.",
    )
    parser.add_argument("--version", action="version", version=f"halfway {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in _COMMANDS:
        importlib.import_module(f"halfway.lab.commands.{name}").register(commands)
    parsed, rest = parser.parse_known_args(arguments)
    # argparse stops collecting positional arguments at the first option, but key=value is allowed anywhere.
    if rest and not (hasattr(parsed, "settings") and all("=" in word and word[0] != "-" for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.settings = [*parsed.settings, *rest]
    try:
        code = int(parsed.run(parsed) or 0)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has closed the pipe: `halfway layers resnet50 | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, TypeError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        missing = isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] in _LAB
        fix = "; pip install '.[lab]' in a checkout of halfway brings what this command needs" if missing else ""
        print(f"halfway {parsed.command}: {error}{fix}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
