"""`halfway coreset`: choose a part of the training images once, before training."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import add_command

if TYPE_CHECKING:
    from ...coresets import Coreset
    from ..coresets.choose import Choice
    from ..data import Data

_DESCRIPTION = """\
Choose a part of a recipe's training images and write it to a file, for `halfway train RECIPE --subset FILE`. Most
methods look at a proxy, a training that is made first:

  nothing            random_coreset
  a whole training   herding, k_center, forgetting, aum, moderate, ccs, craig, glister, influence, dataset_pruning
  a smaller network  svp (give it: model.options.width=8)
  ten short ones     el2n, grand, grand_last: the recipe's schedule, stopped after a tenth of the steps
  checkpoints        moso: ten each of two whole trainings
  a run that pruned  retention: what that run retained most often

The proxies are run folders in DIR (default: runs/coresets-RECIPE). Methods, ratios and seeds share them: nothing is
trained twice, and the same command goes on after Ctrl-C, a crash or a kill. They train on exactly the images that the
recipe trains on; ids in the file are positions among these.

Settings of the model (model.name=, model.options.width=) make a cheaper proxy for any method and do not change the unit
of the cost, which is one run of the recipe on all its data. Settings of a method are a section: svp.measure=entropy.
"""
_EPILOG = """\
examples:
  halfway coreset el2n tiny-cifar10 --keep 0.5 --data data
  halfway train tiny-cifar10 --subset runs/coresets-tiny-cifar10/el2n-0.5-s0.pt
  halfway coreset svp tiny-cifar10 --keep 0.5 model.options.width=8
  halfway coreset forgetting tiny-cifar10 --keep 0.3 --proxy-epochs 8
  halfway coreset retention runs/tiny-cifar10-infobatch-0.5-s0 --keep 0.5
  halfway report runs/coresets-tiny-cifar10                      how the methods' scores agree, with pictures
  halfway compare tiny-cifar10 --methods full,rs2,el2n,craig --ratios 0.5
"""


def register(commands: Any) -> None:
    """Add `coreset` to the command line."""
    from .train import add_recipe_options

    parser = add_command(commands, "coreset", "choose a part of the training images once", _DESCRIPTION, _EPILOG)
    parser.add_argument("method", metavar="METHOD", help="see above")
    add_recipe_options(parser)
    parser.add_argument("--keep", type=float, required=True, metavar="S", help="the share to retain, in (0, 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the choice (default: 0)")
    parser.add_argument("--no-class-balance", action="store_true", help="classes need not retain the same share")
    parser.add_argument("--proxy-epochs", type=int, metavar="N", help="length of the proxies (default: the recipe's)")
    parser.add_argument("--proxy-runs", type=int, metavar="K", help="how many (default: 10 short ones, 2 for moso)")
    parser.add_argument("--proxy-seed", type=int, default=1000, metavar="N", help="of the first (default: %(default)s)")
    parser.add_argument("--record", metavar="RUN", help="the run folder that `retention` reads")
    parser.add_argument("--folder", metavar="DIR", help="of the proxies (default: runs/coresets-RECIPE)")
    parser.add_argument("--out", metavar="FILE", help="the subset (default: DIR/METHOD-KEEP-sSEED.pt)")
    parser.add_argument("--report", action="store_true", help="also write DIR/report.html, see `halfway report DIR`")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train the proxies that are missing, choose, and say what it costs."""
    from .. import data
    from ..files import DiskFullError
    from ..training import session
    from .train import fetch_data

    choice = _choice(arguments)
    choice.check()
    command = session.command_line()
    if arguments.download:
        fetch_data(choice.recipe)
    with session.processes() as device:
        loaded = data.load(choice.recipe.data, choice.recipe.root, device)
        if session.first_rank():
            print(f"{choice.recipe.title}\n{loaded.description}\nfolder: {choice.folder}", flush=True)
        try:
            made = choice.make(loaded, device, command)
        except DiskFullError as error:
            raise ValueError(f"{error}, then go on: {command}") from error
        if not session.first_rank():
            return 0
        if made is None:
            print(f"stopped; to go on: {command}")
            return 130
    print(_told(made, choice, loaded, arguments))
    if arguments.report:
        from ..report import coresets as page

        print(page.write_to(choice.folder, choice.folder / "report.html", arguments.data))
    return 0


def _choice(arguments: argparse.Namespace) -> Choice:
    from ..coresets.choose import Choice
    from ..coresets.proxies import ProxyOptions
    from ..recipes import reading
    from ..recipes.conversion import nested
    from .train import read_recipe

    record = None if arguments.record is None else Path(arguments.record)
    if arguments.method == "retention" and Path(arguments.recipe).is_dir():  # halfway coreset retention RUN_FOLDER
        record = Path(arguments.recipe)
        arguments.recipe = str(record / "config.yaml")
    for word in arguments.settings:
        if (key := word.split("=")[0].strip()) in ("method", "prune_ratio", "seed"):
            raise ValueError(f"drop {key}=: --keep is the share to retain, --seed that of the choice")
    network = [word for word in arguments.settings if _of_model(word)]
    others = [word for word in arguments.settings if not _of_model(word)]
    recipe = read_recipe(argparse.Namespace(**{**vars(arguments), "settings": others}))
    changes = nested(reading.parse_settings(network)).get("model", {})
    epochs = arguments.proxy_epochs if arguments.proxy_epochs is not None else recipe.coreset.proxy_epochs
    folder = Path(arguments.folder or f"runs/coresets-{recipe.name}")
    options = ProxyOptions(changes, epochs, arguments.proxy_runs, arguments.proxy_seed)
    return Choice(
        arguments.method,
        recipe.with_settings({"method": "full"}),
        arguments.keep,
        folder,
        arguments.seed,
        not arguments.no_class_balance,
        options,
        record,
        Path(arguments.out) if arguments.out else None,
    )


def _of_model(word: str) -> bool:
    return word.split("=")[0].split(".")[0].strip() == "model"


def _told(made: Coreset, choice: Choice, loaded: Data, arguments: argparse.Namespace) -> str:
    """What was retained, what it costs, and how to go on."""
    from ..coresets.chosen import kept_per_class, labels_of

    share, runs = len(made) / made.num_samples, made.cost["runs"]
    proxy = f"; its proxies ({made.cost['set']}) cost {runs:.3f}, together {share + runs:.3f}" if runs else ""
    others = [word for word in arguments.settings if not _of_model(word)]
    length = ["--epochs", str(arguments.epochs)] if arguments.epochs is not None else []
    root = ["--data", arguments.data] if arguments.data is not None else []
    words = ["halfway", "train", arguments.recipe, "--subset", str(choice.file), *root, *length, *others]
    return (
        f"{choice.file}: {len(made):,} of {made.num_samples:,} training images, keep {choice.keep:g}, pruning ratio "
        f"{1 - choice.keep:g}\n"
        f"per class: {kept_per_class(made, labels_of(loaded), loaded.classes)}\n"
        f"a training on it costs {share:.3f} of one on all data{proxy} (FLOPs)\n"
        f"to train on it: {shlex.join(words)}"
    )
