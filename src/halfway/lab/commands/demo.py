"""`halfway demo`: see the method at work, and what it costs, in a few minutes on a laptop."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import add_command

_HELP = """\
Trains a small ResNet on 1,200 real handwritten digits (they ship with scikit-learn; nothing is downloaded) on all data,
with random pruning, with PFB (Partial Forward Blocking), and, for what PFB costs, with random pruning in all epochs and
on all data for fewer steps. At each seed all of them start from the same weights and see the same batches, so that only
the pruning differs.

It is `halfway compare digits --controls COST`, then `halfway report`: the table is printed, and a page to look at is
written. The columns are those of `halfway compare --help`. Finished runs are not repeated: the same command goes on
after an interruption."""

_EXAMPLES = """\
examples:
  halfway demo                          about two minutes on two quiet cores
  halfway demo --prune-ratio 0.7        where the choice of samples matters more
  halfway demo --seeds 10 --out demo10  ten seeds: narrower intervals, three times as long"""


def register(commands: Any) -> None:
    """Add `demo` to the command line."""
    parser = add_command(
        commands,
        "demo",
        "train on real digits with full data, random pruning and PFB, and write a page about it",
        _HELP,
        _EXAMPLES,
    )
    parser.add_argument(
        "--out", default="halfway-demo", metavar="DIR", help="where index.html and the runs go (%(default)s)"
    )
    parser.add_argument("--prune-ratio", type=float, metavar="P", help="share of each batch to prune (0.5)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="repetitions (%(default)s)")
    parser.add_argument("--epochs", type=int, metavar="N", help="the first and last tenth see all data (10)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare, then write the report."""
    from .. import report
    from ..comparison import trials
    from ..comparison.verdict import headline, reading
    from ..files import write_whole
    from ..recipes.predicted_cost import predicted_cost
    from ..recipes.reading import load as load_recipe
    from ..training import session
    from .compare import carry_out

    recipe = load_recipe("digits")
    ratio = recipe.require_one_ratio("demo") if arguments.prune_ratio is None else arguments.prune_ratio
    if not 0.05 <= ratio <= 0.9:
        raise ValueError(f"--prune-ratio is the share of each batch to prune and must be in [0.05, 0.9], got {ratio}")
    if arguments.seeds < 1:
        raise ValueError(f"--seeds is the number of repetitions and must be at least 1, got {arguments.seeds}")
    if arguments.epochs is not None:
        if arguments.epochs < 3:
            raise ValueError(f"--epochs must be at least 3, got {arguments.epochs}: fewer leave none to prune in")
        recipe = recipe.of_length(arguments.epochs)
    out = Path(arguments.out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {arguments.out} is a file; choose another folder")
    seeds = range(arguments.seeds)
    cost = predicted_cost(recipe.with_settings({"method": "pfb", "prune_ratio": ratio})).run
    plan = trials.plan(recipe, ["full", "random", "pfb"], [ratio], seeds, {}, controls=[cost])
    print(f"{recipe.title}: {len(plan)} runs of up to {recipe.length} epochs")
    code = carry_out(plan, out, rounds=15, command=session.command_line())
    if code:
        return code
    runs = report.runs.read([out])
    page = out / "index.html"
    write_whole(page, report.write(runs, None, "halfway demo"))
    print("\n" + "\n".join([f"{headline(runs.rows)}.", *reading(runs.rows)]))
    print(f"\nLook at {page}")
    return 0
