"""`halfway compare`: methods side by side, at the same seeds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import add_command

if TYPE_CHECKING:
    from ..comparison.trials import Trial

_DESCRIPTION = """\
Train a recipe with several methods, pruning ratios and seeds, and print one table. At a given seed all methods start
from the same weights and see the same batches, so that differences are paired. Finished runs are skipped: the same
command goes on after an interruption, and more seeds or ratios can be added later.

  score      after the last epoch (no epoch is picked): mean ± standard error over seeds (n)
  vs full    difference to full data, paired by seed, with its 95 % t interval from the residual of method + seed,
             pooled over all methods
  vs random  the same against random pruning at the same ratio and, where such runs exist, at the same cost (FLOPs of
             the run within 1 %)
  vs random, no window; vs shorter; vs rs2; equivalent cost
             against the controls, see below
  pruned     effective ratio: of the samples in pruned steps / of all samples of the run
  FLOPs      relative to full data: of a pruned step / of the run
  keep, FLOPs with proxy
             of methods that decide once: the share of the images, and the run together with the proxies it needs
  wall       of a pruned step relative to a full one: median [quartiles] of --rounds steps of all methods in turn

What counts is what a method really prunes and costs: InfoBatch at p = 0.3 may prune 0.15, and a method that looks at
losses pays the forward pass of all samples. --equal ratio makes every method prune p; --equal flops gives every method
the ratio at which a pruned step costs what PFB's costs at p; --random-at-equal-cost adds random pruning at the ratios
at which it costs what each of the others does.

Random pruning in the recipe's window is a weak rival. The controls know no window and cost 1 - p at their ratio p:
  random_even    the same cost spread evenly: random pruning in all epochs
  shorter        full data for fewer optimizer steps, down to part of an epoch; the learning rate ends where it should
  smaller_batch  as many steps as full data, on batches as small as random pruning makes them, drawn without
                 replacement through the data; smaller_batch_scaled also scales the learning rate
Among --methods each is trained at the cost of random pruning at p. --controls 0.5,0.7,0.85 trains random_even and
shorter at these costs, and `auto` chooses costs from the cheapest method up to full data: with three points or more
(full data are one) they are curves, interpolated in log cost, that every method is compared with at its own cost. The
equivalent cost is the cost at which random pruning reaches the method's score, with its bootstrap interval.
A method is better only if it is better than random_even and than shorter, worse if it is worse than either, else not
told apart. Methods that decide before the epoch take fewer steps and are judged beside rs2 instead of random_even.

Methods that decide once (`halfway coreset --help`) choose a subset first, at each seed anew from the same proxies.
These are trained in coresets-RECIPE beside DIR, and all methods share them. There is no window.

--over sweeps any setting of the recipe or the method; given several times, all combinations. --over
selection_seed=null,7 repeats every method with another draw and the same weights and batches (A/A).
"""
_EPILOG = """\
examples:
  halfway compare tiny-cifar10 --data data
  halfway compare tiny-cifar10 --ratios 0.3,0.5,0.7 --seeds 0,1,2 --out runs/c10
  halfway compare tiny-cifar100 --methods pfb --over density.noise=0.0001,0.01,1
  halfway compare tiny-cifar10 --methods full,pfb --over cut=relu,layer1,layer2,layer3
  halfway compare tiny-cifar10 --methods full,random,infobatch,divbs,pfb --equal flops
  halfway compare tiny-cifar10 --methods all --random-at-equal-cost --controls auto
  halfway compare tiny-cifar10 --methods full,random,random_even,shorter,smaller_batch,smaller_batch_scaled
  halfway compare tiny-cifar10 --methods full,rs2,shorter,random_coreset,el2n,forgetting,craig "window=[0,null]"
  halfway compare tiny-cifar10 --methods random --over selection_seed=null,7
  halfway compare tiny-cifar10 --methods craig --over coreset.weights=true,false "window=[0,null]"
  halfway compare tiny-cifar10 --methods all --workers 2
"""


def register(commands: Any) -> None:
    """Add `compare` to the command line."""
    from .train import add_recipe_options

    parser = add_command(commands, "compare", "methods side by side, at the same seeds", _DESCRIPTION, _EPILOG)
    add_recipe_options(parser)
    parser.add_argument(
        "--methods",
        default="full,random,pfb",
        metavar="M,...",
        help="names (`halfway train --help` lists them); `all`: without rho, rho_remembered, proxy, "
        "class_balanced, coresets and controls (default: %(default)s)",
    )
    parser.add_argument("--ratios", metavar="P,...", help="pruning ratios (default: the recipe's)")
    parser.add_argument("--seeds", default="0,1,2", metavar="N,...", help="(default: %(default)s)")
    parser.add_argument(
        "--over", action="append", default=[], metavar="key=a,b,c", help="sweep a setting; may be given several times"
    )
    parser.add_argument("--equal", choices=("ratio", "flops"), help="what all methods have in common (default: p)")
    parser.add_argument(
        "--random-at-equal-cost", action="store_true", help="also random pruning for the price of each other method"
    )
    parser.add_argument(
        "--controls",
        metavar="C,...",
        help="also random_even and shorter at these costs relative to full data; `auto`: from the cheapest method up",
    )
    parser.add_argument("--fewer-epochs", action=_Replaced, help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true", help="train nothing, tabulate the finished runs")
    parser.add_argument("--out", metavar="DIR", help="folder of the comparison (default: runs/compare-RECIPE)")
    parser.add_argument(
        "--rounds", type=int, default=15, metavar="N", help="steps to time side by side; 0: none (default: %(default)s)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="train runs in so many processes of one thread each, the fastest way on a CPU (default: one after the "
        "other, with all threads)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan the runs, then see `carry_out`."""
    from ..comparison import trials
    from ..recipes import methods, reading
    from ..training import session
    from .train import fetch_data, read_recipe

    if arguments.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {arguments.workers}")
    recipe = read_recipe(arguments)
    over = {}
    for sweep in arguments.over:
        for key, values in reading.parse_settings([sweep]).items():
            over[key] = [reading.parse_value(v) for v in _words(values)]
    named = [methods.comparable() if word == "all" else [word] for word in _words(arguments.methods)]
    plan = trials.plan(
        recipe,
        [method for group in named for method in group],
        _list(arguments.ratios, "--ratios", float) if arguments.ratios else [recipe.require_one_ratio("compare")],
        _list(arguments.seeds, "--seeds", int),
        over,
        arguments.equal,
        arguments.random_at_equal_cost,
        _costs(arguments.controls),
    )
    folder = Path(arguments.out or f"runs/compare-{recipe.name}")
    if arguments.download and not arguments.table:
        fetch_data(recipe)
    code = carry_out(plan, folder, arguments.rounds, session.command_line(), arguments.table, arguments.workers)
    if code == 0 and session.first_rank():
        print(f"\nThe same in {folder / 'table.md'}; a page with figures: halfway report {folder}")
    return code


def carry_out(
    plan: Sequence[Trial], folder: Path, rounds: int, command: str, only_tabulate: bool = False, workers: int = 1
) -> int:
    """Train what is missing, time the steps, print the table and write it down; returns the exit code.

    Args:
        rounds: steps to time side by side, 0 for none.
        command: kept with the results, and printed to go on with.
        only_tabulate: train and time nothing.
        workers: processes that train runs.
    """
    from ..comparison import results, table
    from ..comparison import run as comparison
    from ..comparison.prepared import prepared, shared
    from ..comparison.results import rivals
    from ..comparison.subsets import with_subsets
    from ..comparison.verdict import judged
    from ..files import DiskFullError, write_whole
    from ..training import session

    with session.processes() as device:
        if workers > 1 and (device.type != "cpu" or not session.alone()):
            raise ValueError("--workers is for one machine without a GPU; leave it out here")
        try:
            chosen = plan if only_tabulate else with_subsets(plan, folder, device, command, workers)
            finished = chosen is not None
            if chosen is not None and not only_tabulate:
                plan = chosen
                todo = comparison.check(plan, folder)
                if session.first_rank():
                    results.note_plan(folder, plan, command)
                finished = comparison.train_all(todo, folder, device, command, workers)
        except DiskFullError as error:
            raise ValueError(f"{error}, then go on: {command}") from error
        if not session.first_rank():
            return 0
        if not finished:
            print(f"stopped; to go on: {command}")
            return 130
        found = comparison.finished(plan, folder)
        if not found:
            raise ValueError(f"no run of this comparison is finished in {folder}")
        # Steps are timed by a single process: several would have to agree on an order.
        rounds = rounds if session.alone() and not only_tabulate else 0
        timing = comparison.timing(plan, folder, device, rounds, found)
    rows = results.summarise(found, timing["steps"])
    print(f"\n{table.text(rows)}")
    charges = "".join(f"\n{each}\n" for each in [*prepared(found), *shared(found)])
    print(charges, end="")
    if unjudged := [row.group.label for row in rows if rivals(row.group.method) and judged(row) is None]:
        print(f"\nNot judged, for want of random_even and shorter at that cost: {'; '.join(unjudged)}. --controls auto")
    run = next(iter(next(iter(found.values())).values()))
    write_whole(folder / "table.md", table.markdown(rows, command, run.recipe, run.sessions[-1], timing) + charges)
    results.write(folder, rows, command, found, timing)
    return 0


class _Replaced(argparse.Action):
    """An option that older commands have."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(nargs=0, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error("--fewer-epochs is now --controls auto, which counts steps instead of epochs")


def _costs(text: str | None) -> list[float] | Literal["auto"]:
    if text is None:
        return []
    return "auto" if text == "auto" else _list(text, "--controls", float)


def _words(text: Any) -> list[str]:
    return [word.strip() for word in str(text).split(",") if word.strip()]


def _list(text: str, option: str, kind: type) -> list[Any]:
    try:
        return [kind(word) for word in _words(text)]
    except ValueError:
        raise ValueError(f"{option} takes numbers with commas, like 0,1,2, got {text!r}") from None
