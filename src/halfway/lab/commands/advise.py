"""`halfway advise`: would pruning pay in this training?"""

from __future__ import annotations

import argparse
from typing import Any

from . import add_command
from .train import add_recipe_options, fetch_data, read_recipe

_DESCRIPTION = """\
Try a recipe for a few minutes, and say whether pruning would pay in it, and how. Nothing is written.

Two short trainings bound where the planned one will end. *Fewer passes* sees all images, each less often than planned;
it fits them less well than the planned training will. *Fewer images* passes over a handful of batches as often as
planned; it fits them better. What counts is the share of plain losses below 0.1 (a predicted probability above 0.9) at
their ends: while it is small, training underfits and every sample teaches something; where it is large, training
saturates and many samples teach little.

Then steps are timed on this machine: full ones, ones that prune at random, ones that look at features at the cut. The
advice is one of

  fewer epochs          full data, and stop earlier: a step gets no shorter, or nothing did better
  random                prune at random, anew in each batch
  a method              one that beat both of these controls at equal cost, wherever as many losses were small
  no evidence           nothing comparable has been measured: costs only

What is said about accuracy comes from runs at a reduced scale (results/map), with their number and intervals. For your
own loop there is halfway.advise(model, loader, epochs=..., optimizer=...).
"""
_EPILOG = """\
examples:
  halfway advise tiny-cifar10 --download
  halfway advise tiny-cifar10 --data synthetic --minutes 1
  halfway advise cifar100-resnet18 --minutes 20 prune_ratio=0.3 cut=layer2
  halfway advise my-recipe.yaml --data my-folder
"""


def register(commands: Any) -> None:
    """Add `advise` to the command line."""
    parser = add_command(
        commands, "advise", "would pruning pay in this training? a few minutes tell", _DESCRIPTION, _EPILOG
    )
    add_recipe_options(parser)
    parser.add_argument(
        "--minutes", type=float, default=3.0, metavar="M", help="for both trainings together (default: %(default)g)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Try the recipe and print the advice."""
    from .. import data
    from ..training import session
    from ..training.advising import advise_on

    if not 0 < arguments.minutes < float("inf"):
        raise ValueError(f"--minutes must be more than 0, got {arguments.minutes:g}")
    recipe = read_recipe(arguments)
    if arguments.download:
        fetch_data(recipe)
    with session.processes() as device:
        if not session.alone():
            raise ValueError("halfway advise tries a training in one process; start it without torchrun")
        loaded = data.load(recipe.data, recipe.root, device)
        print(f"{recipe.title}\n{loaded.description}\n", flush=True)
        print(advise_on(recipe, loaded, device, 60 * arguments.minutes, _words(arguments)))
    return 0


def _words(arguments: argparse.Namespace) -> list[str]:
    """What describes the recipe on the command line, for the command to paste."""
    words = [
        arguments.recipe,
        *(word for word in arguments.settings if not word.startswith(("method=", "prune_ratio="))),
    ]
    if arguments.epochs is not None:
        words += ["--epochs", str(arguments.epochs)]
    return words if arguments.data is None else [*words, "--data", arguments.data]
