"""`halfway report`: a page about finished runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import add_command

_DESCRIPTION = """\
Write a page about runs: the results in plain sentences, the table, accuracy against cost, curves over the training,
which classes and samples were pruned and retained, with pictures, and how it was measured. It is one HTML file that
opens from disk, without a network, in the browser's light or dark mode.

RUN is the folder of a comparison (`halfway compare`), of a run (`halfway train`), or of several runs. Rows are the
groups that `compare` wrote into results.json; loose runs that differ only in the seed form one row.
Unfinished runs are named and left out. All runs must be of the same recipe. Where only results.json is left of a
comparison, the table and the first figure are written from it.

Pictures need the data set: --data says where it is now. Without it the rest of the page is still written.

RUN may also be a folder of subset files (`halfway coreset`): the page then shows how far the methods' scores agree, and
which images each of them likes most and least. Or a study (study.yaml, or the folder that holds it and its runs.jsonl):
the map, the primary family, claims, and every arm of every stage in one table.

A report runs no code that the runs name. Sections that need a user's own model (package.module:factory, or options of
torchvision's or timm's builder) are left out unless you --trust the runs.
"""
_EPILOG = """\
examples:
  halfway report runs/compare-tiny-cifar10
  halfway report runs/compare-tiny-cifar10 --data data --out cifar10.html
  halfway report runs/tiny-cifar10-full-s0 runs/tiny-cifar10-pfb-0.5-s0
  halfway report runs/coresets-tiny-cifar10
  halfway report results/map                           (a study)
  halfway report runs/mine --trust                     (trained on my own model)
  halfway report runs/noise-a runs/noise-b --title "Noise, two sweeps"
"""


def register(commands: Any) -> None:
    """Add `report` to the command line."""
    parser = add_command(commands, "report", "write a page about finished runs", _DESCRIPTION, _EPILOG)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders that hold some")
    parser.add_argument("--out", metavar="FILE", help="the page (default: report.html in the first RUN)")
    parser.add_argument("--data", metavar="DIR", help="where the data are (default: where they were in training)")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="import and build the models that the run folders name; only for your own runs",
    )
    parser.add_argument("--title", metavar="TEXT", help="the line above the headline (default: the recipe's name)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read the runs, write the page."""
    from .. import report
    from ..files import write_whole
    from ..report import coresets, studies

    paths = [Path(each).parent if Path(each).name == studies.STUDY else Path(each) for each in arguments.runs]
    out = Path(arguments.out) if arguments.out else paths[0] / "report.html"
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; name a file in it, like {out / 'report.html'}")
    folder = paths[0] if len(paths) == 1 else None
    if folder is not None and coresets.holds_subsets(folder):
        opinions = coresets.opinions(folder)
        told, page = f"{len(opinions)} methods", coresets.write(opinions, arguments.data, arguments.title)
    elif folder is not None and studies.holds_study(folder):
        study = studies.read(folder)
        told, page = f"{len(study.stages)} stages", studies.write(study, folder, arguments.title)
    else:
        runs = report.runs.read(arguments.runs)
        left_out = f", {len(runs.unfinished)} left out: not finished" if runs.unfinished else ""
        told = f"{len(runs.finished)} runs" if runs.finished else f"{len(runs.rows)} rows of results.json"
        told, page = f"{told}{left_out}", report.write(runs, arguments.data, arguments.title, arguments.trust)
    try:
        write_whole(out, page)
    except OSError as error:
        raise ValueError(f"{out} cannot be written ({error.strerror}); choose another with --out") from error
    print(f"{told}. Look at {out}")
    return 0
