"""`halfway compare`: methods side by side, at the same seeds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_DESCRIPTION = """\
Train a recipe with several methods, pruning ratios and seeds, and print one table. At a given seed all methods start
from the same weights and see the same batches, so that differences are paired. What is done is skipped: the same
command goes on after an interruption, and more seeds or ratios can be added later.

  score     mean ± standard error over seeds (n); of the last epoch, nothing is picked
  - full    difference to full data, paired by seed, with its 95 % t interval; - random likewise, at the same ratio
  pruned    effective ratio: of the samples in pruned steps / of all samples of the run
  FLOPs     relative to full data: of a pruned step / of the run
  wall      of a pruned step relative to a full one: median [quartiles] of --rounds steps of all methods in turn

--over sweeps any setting of the recipe or the method; given several times, all combinations.
"""
_EPILOG = """\
examples:
  halfway compare tiny-cifar10 --data data
  halfway compare tiny-cifar10 --ratios 0.3,0.5,0.7 --seeds 0,1,2 --out runs/c10
  halfway compare tiny-cifar100 --methods pfb --over density.noise=0.0001,0.01,1
  halfway compare tiny-cifar10 --methods full,pfb --over cut=relu,layer1,layer2,layer3
"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    from .train_command import add_recipe_options

    parser = commands.add_parser(
        "compare",
        help="methods side by side, at the same seeds",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recipe_options(parser)
    parser.add_argument("--methods", default="full,random,pfb", metavar="M,...", help="(default: %(default)s)")
    parser.add_argument("--ratios", metavar="P,...", help="pruning ratios (default: the recipe's)")
    parser.add_argument("--seeds", default="0,1,2", metavar="N,...", help="(default: %(default)s)")
    parser.add_argument(
        "--over", action="append", default=[], metavar="key=a,b,c", help="sweep a setting; may be given several times"
    )
    parser.add_argument("--out", metavar="DIR", help="folder of the comparison (default: runs/compare-RECIPE)")
    parser.add_argument(
        "--rounds", type=int, default=15, metavar="N", help="steps to time side by side; 0: none (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train what is missing, time, print."""
    from . import comparison, session, summary, trials
    from . import recipe as recipes
    from .files import write_json, write_whole
    from .train_command import read_recipe

    recipe = read_recipe(arguments)
    ratios = (
        [float(p) for p in _list(arguments.ratios, "--ratios", float)] if arguments.ratios else [recipe.prune_ratio]
    )
    over = {}
    for sweep in arguments.over:
        for key, values in recipes.parse_settings([sweep]).items():
            over[key] = [recipes.parse_value(v) for v in _words(values)]
    plan = trials.plan(
        recipe, _words(arguments.methods), ratios, [int(s) for s in _list(arguments.seeds, "--seeds", int)], over
    )
    folder = Path(arguments.out or f"runs/compare-{recipe.name}")
    command = session.command_line()
    with session.processes() as device:
        finished = comparison.train_all(plan, folder, device, command)
        if not session.first_rank():
            return 0
        if not finished:
            print(f"stopped; to go on: {command}")
            return 130
        groups = {trial.group: trial.recipe for trial in plan}
        # Steps are timed by a single process: several would have to agree on who is next.
        rounds = arguments.rounds if session.alone() else 0
        timing = comparison.timing(list(groups), groups, folder, device, rounds)
    results = comparison.results(plan, folder)
    table = summary.summarise(results, timing["steps"])
    print(f"\n{summary.text(table)}")
    write_whole(folder / "table.md", summary.markdown(table, command, results, timing))
    write_json(folder / "results.json", summary.as_json(table, command, results, timing))
    print(f"\nThe same in {folder / 'table.md'}; a page with figures: halfway report {folder}")
    return 0


def _words(text: Any) -> list[str]:
    return [word.strip() for word in str(text).split(",") if word.strip()]


def _list(text: str, option: str, kind: type) -> list[Any]:
    try:
        return [kind(word) for word in _words(text)]
    except ValueError:
        raise ValueError(f"{option} takes numbers with commas, like 0,1,2, got {text!r}") from None
