"""`halfway irreducible`: the losses that `rho` and `rho_remembered` compare with, without other labelled images."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import add_command

_DESCRIPTION = """\
RHO-Loss prefers samples whose loss exceeds their irreducible loss: that of a model which was never trained on them.
This command makes such losses for all training images of a recipe, without further images (cross-fitting):

  1. The training images are split into folds. Each class is spread evenly over them, and copies of an image (the same
     pixels) are in one fold.
  2. For each fold the recipe is trained on all the others, with method full.
  3. Whenever the recipe evaluates, the images of the fold are scored: plain loss, eval mode, not augmented. What counts
     are the losses at the moment when their mean was lowest.
  4. Each fold's mean is subtracted from its losses and the mean of all added: one model may be better than another.

DIR/losses.pt holds them, what they were made from, and what they cost. DIR/fold-0, DIR/fold-1, ... are run folders.
Ctrl-C, a crash or a kill loses at most one epoch: the same command goes on, and nothing is trained twice.

What it costs: two folds train on half of the images each, together as much as one run of the recipe; K folds as much as
K - 1 runs (K, if the recipe counts steps). Scoring comes on top: a forward pass of each image per evaluation, so that
evaluate_every=4 saves some. Many runs must share the file until it pays; `halfway compare` says how many.

Settings of the model (model.name=, model.options.width=) make a cheaper proxy and do not change the unit of the cost.
Mind that a proxy weaker than the network which uses its losses can be worse than none.
"""
_EPILOG = """\
examples:
  halfway irreducible tiny-cifar10 --data data
  halfway train tiny-cifar10 --method rho rho.losses=runs/irreducible-tiny-cifar10/losses.pt
  halfway compare tiny-cifar10 --methods full,random,rho rho.losses=runs/irreducible-tiny-cifar10/losses.pt
  halfway irreducible tiny-cifar10 --folds 4 --out runs/four
  halfway irreducible tiny-cifar10 model.options.width=8 --out runs/narrow
"""


def register(commands: Any) -> None:
    """Add `irreducible` to the command line."""
    from .train import add_recipe_options

    parser = add_command(commands, "irreducible", "the losses that RHO-Loss compares with", _DESCRIPTION, _EPILOG)
    add_recipe_options(parser)
    parser.add_argument("--folds", type=int, default=2, metavar="K", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, metavar="N", help="of weights, batches and augmentation (default: 0)")
    parser.add_argument("--out", metavar="DIR", help="the folder (default: runs/irreducible-RECIPE)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train the folds that are missing, and put their losses together."""
    from ..files import DiskFullError
    from ..training import cross_fitting, session
    from .train import fetch_data, read_recipe

    _refuse(arguments.settings)
    seed = {} if arguments.seed is None else {"seed": arguments.seed}
    recipe = read_recipe(arguments).with_settings(seed)
    others = [word for word in arguments.settings if word.split("=")[0].split(".")[0].strip() != "model"]
    whole = read_recipe(argparse.Namespace(**{**vars(arguments), "settings": others}))
    folder = Path(arguments.out or f"runs/irreducible-{recipe.name}")
    recipes = cross_fitting.fold_recipes(recipe, arguments.folds)
    todo = cross_fitting.check(recipes, folder)
    command = session.command_line()
    if arguments.download:
        fetch_data(recipe)
    with session.processes() as device:
        talks = session.first_rank()
        if talks:
            done = len(recipes) - len(todo)
            done_already = f", {done} of them trained already" if done else ""
            print(f"{recipe.title}\n{len(recipes)} folds{done_already}\nfolder: {folder}", flush=True)
        try:
            finished = cross_fitting.train(recipes, todo, folder, device, command)
            if not talks:
                return 0
            if not finished:
                print(f"stopped; to go on: {command}")
                return 130
            made = cross_fitting.write(recipes, whole, folder, command)
        except DiskFullError as error:
            raise ValueError(f"{error}, then go on: {command}") from error
    print(
        f"{folder / cross_fitting.FILE}: {len(made['losses']):,} losses, mean {made['losses'].mean():.4f}; they cost "
        f"as much as {made['cost']['runs']:.2f} runs of {whole.name} (FLOPs)"
    )
    return 0


def _refuse(settings: list[str]) -> None:
    """Settings that would be ignored."""
    for word in settings:
        key = word.split("=")[0].strip()
        if key in ("method", "prune_ratio"):
            raise ValueError(f"the folds are trained on all their data, so drop {key}=")
