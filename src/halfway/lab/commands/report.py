"""`halfway report`: a page about finished runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_DESCRIPTION = """\
Write a page about runs: what came out in plain sentences, the table, accuracy against cost, curves over the training,
which classes and samples were pruned and retained, with pictures, and how it was measured. One HTML file with
everything inside; it opens from disk, without a network, light or dark as the browser is.

RUN is the folder of a comparison (`halfway compare`), of a run (`halfway train`), or of several runs. Rows are the
groups that `compare` wrote into results.json; of loose runs, those that differ in nothing but the seed are one row.
Unfinished runs are named and left out. All runs must be of the same recipe. Where only results.json is left of a
comparison, the table and the first figure are written from it.

Pictures need the data set: --data says where it lies now. Without it the rest of the page is still written.

A report runs no code of the runs: what needs a model of somebody's own (package.module:factory, or one with options of
torchvision's or timm's builder) is left out unless you --trust them.
"""
_EPILOG = """\
examples:
  halfway report runs/compare-tiny-cifar10
  halfway report runs/compare-tiny-cifar10 --data data --out cifar10.html
  halfway report runs/tiny-cifar10-full-s0 runs/tiny-cifar10-pfb-0.5-s0
  halfway report runs/mine --trust                     (trained on a model of my own)
  halfway report runs/noise-a runs/noise-b --title "Noise, two sweeps"
"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "report",
        help="write a page about finished runs",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders that hold some")
    parser.add_argument("--out", metavar="FILE", help="the page (default: report.html in the first RUN)")
    parser.add_argument("--data", metavar="DIR", help="where the data lie (default: where they lay in training)")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="imports and builds the models that the run folders name; only for runs of your own",
    )
    parser.add_argument("--title", metavar="TEXT", help="the line above the headline (default: the recipe's name)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read the runs, write the page."""
    from .. import report
    from ..files import write_whole

    out = Path(arguments.out) if arguments.out else Path(arguments.runs[0]) / "report.html"
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; name a file in it, like {out / 'report.html'}")
    runs = report.runs.read(arguments.runs)
    try:
        write_whole(out, report.write(runs, arguments.data, arguments.title, arguments.trust))
    except OSError as error:
        raise ValueError(f"{out} cannot be written ({error.strerror}); choose another with --out") from error
    left_out = f", {len(runs.unfinished)} left out: not finished" if runs.unfinished else ""
    told = f"{len(runs.finished)} runs" if runs.finished else f"{len(runs.rows)} rows of results.json"
    print(f"{told}{left_out}. Look at {out}")
    return 0
