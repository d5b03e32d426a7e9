"""`halfway train`: train a recipe, with or without pruning."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import add_command

if TYPE_CHECKING:
    from ..recipes.schema import Recipe

_DESCRIPTION = """\
Train a recipe. `halfway recipes` lists those that ship with halfway and what they will cost; your own .yaml file works
as well, and so does the config.yaml of an earlier run.

The run folder holds config.yaml (repeats the run), metrics.jsonl and tensorboard/ (one entry per epoch) and last.pt
(the checkpoint; torch.load(..., weights_only=True)). Ctrl-C, a crash or a kill loses at most one epoch: the same
command with --resume goes on and ends with bit-identical weights.

Every setting can be changed: `optimizer.lr=0.05 batch_size=64 density.noise=0.1 cut=layer2`.

methods, by what runs on a pruned sample:
  nothing              random, random_even (in all epochs), auto, rotate, class_balanced, last_loss, last_loss_hard,
                       last_loss_proportional, order_dp, rho_remembered, balanced_remembered, balanced_proportional
  nothing, not loaded  infobatch, infobatch_dagger, ucb, epsilon_greedy, dyn_unc, rs2, random_subset
  nothing, not loaded, decided once with --subset FILE (`halfway coreset` makes it; no window)
                       random_coreset, herding, k_center, svp, forgetting, el2n, grand, grand_last, aum, moderate, ccs,
                       craig, glister, influence, dataset_pruning, moso, retention
  a small model        proxy
  the shallow layers   pfb, density_public, balanced, early_exit
  the forward pass     loss, loss_rank, selective_backprop, grad_norm, divbs, rho, uncertainty
  everything           full, shorter (1 - p of the steps), smaller_batch, smaller_batch_scaled (batches of 1 - p of the
                       size, with the learning rate as it is and scaled by 1 - p)

random_even, shorter and smaller_batch are controls: no window, a cost of 1 - p. selection_seed=1 draws anew what is
pruned and leaves weights and batches as they are.
"""
_EPILOG = """\
examples:
  halfway train tiny-cifar10 --download                      170 MB once, then about a minute on two cores
  halfway train tiny-cifar10 --data synthetic --epochs 3     without any data
  halfway train tiny-cifar10 --method random --prune-ratio 0.5
  halfway train cifar100-resnet18 --prune-ratio 0.3 --seed 1 --out runs/c100-s1
  halfway train tiny-cifar10 --method full data.holdout=true --save-losses runs/holdout.pt
  halfway train tiny-cifar10 --method rho rho.losses=runs/holdout.pt --prune-ratio 0.5
  halfway train tiny-cifar10 --subset runs/coresets-tiny-cifar10/el2n-0.5-s0.pt
  halfway train imagenet-resnet50 model.name=resnet26d data.classes=5 batch_size=64 --data my-folder
  torchrun --nproc-per-node 4 -m halfway train imagenet-resnet50 --data imagenet
"""


def register(commands: Any) -> None:
    """Add `train` to the command line."""
    parser = add_command(commands, "train", "train a recipe", _DESCRIPTION, _EPILOG)
    add_recipe_options(parser)
    parser.add_argument("--method", metavar="M", help="see above (default: the recipe's, pfb)")
    parser.add_argument("--prune-ratio", type=float, metavar="P", help="share of each batch to prune, in [0, 1)")
    parser.add_argument("--subset", metavar="FILE", help="train on the images that `halfway coreset` wrote there")
    parser.add_argument(
        "--equal-steps",
        action="store_true",
        help="on a subset, take as many steps as on all data, in more epochs (default: as many epochs, fewer steps)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of weights, batches and augmentation (default: 0)")
    parser.add_argument("--out", metavar="DIR", help="the run folder (default: runs/RECIPE-METHOD-RATIO-sSEED)")
    parser.add_argument(
        "--save-losses",
        metavar="FILE",
        help="afterwards write the loss of each training image, not augmented; with data.holdout=true the model has "
        "not seen these images, and the file is for `--method rho rho.losses=FILE`",
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in the folder; there must be one")
    parser.set_defaults(run=run)


def add_recipe_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `train` and `compare` share."""
    parser.add_argument("recipe", metavar="RECIPE", help="a name (`halfway recipes`) or a .yaml file")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="any setting of the recipe")
    parser.add_argument(
        "--epochs", type=int, metavar="N", help="length (in steps for recipes that count steps); the window scales"
    )
    parser.add_argument(
        "--data", metavar="DIR", help="where the data are (default: data); `synthetic` generates pictures"
    )
    parser.add_argument(
        "--download",
        action="store_true",
        help="fetch the data set first, if it is missing there (`halfway data` says more)",
    )


def read_recipe(arguments: argparse.Namespace) -> Recipe:
    """The recipe that the shared options describe."""
    from ..recipes import reading

    recipe = reading.load(arguments.recipe)
    if arguments.epochs is not None:
        if arguments.epochs < 1:
            raise ValueError(f"--epochs must be at least 1, got {arguments.epochs}")
        recipe = recipe.of_length(arguments.epochs)
    changes = reading.parse_settings(arguments.settings)
    if arguments.data is not None:
        changes["root"] = arguments.data
    return recipe.with_settings(changes)


def fetch_data(recipe: Recipe) -> None:
    """Fetch the recipe's data set if it is missing. Call it before processes join: one fetches, the others wait."""
    from ..data import official

    official.fetch_for(recipe.data, recipe.root)


def run(arguments: argparse.Namespace) -> int:
    """Train the recipe in its run folder, and print the result."""
    from .. import data
    from ..files import DiskFullError
    from ..training import irreducible as losses
    from ..training import session
    from ..training.run_folder import RunFolder
    from ..training.run_result import RunResult
    from ..training.trainable import check_trainable

    chosen = {"method": arguments.method, "prune_ratio": arguments.prune_ratio, "seed": arguments.seed}
    recipe = read_recipe(arguments).with_settings({k: v for k, v in chosen.items() if v is not None})
    recipe = _on_subset(recipe, arguments)
    folder = RunFolder(arguments.out or default_folder(recipe))
    folder.check(recipe, arguments.resume)
    if arguments.resume:
        if not folder.config.exists():
            raise ValueError(
                f"nothing to resume in {folder.path}; drop --resume to start there, or give the right folder with --out"
            )
        folder.check_checkpoint()
    check_trainable(recipe)
    if arguments.save_losses is not None and Path(arguments.save_losses).is_dir():
        raise ValueError(f"--save-losses {arguments.save_losses} is a folder; name a file in it")
    if arguments.download:
        fetch_data(recipe)
    with session.processes() as device:
        talks = session.first_rank()
        loaded = data.load(recipe.data, recipe.root, device)
        if talks:
            print(f"{recipe.title}\n{loaded.description}\n{_what(recipe)}\nfolder: {folder.path}", flush=True)
        try:
            finished = session.train(recipe, loaded, device, folder, arguments.resume, session.command_line())
        except DiskFullError as error:
            again = _again() if folder.config.exists() else session.command_line()
            raise ValueError(f"{error}, then go on: {again}") from error
        if not talks:
            return 0
        if not finished:
            print(f"stopped; to go on: {_again()}")
            return 130
        if arguments.save_losses is not None:
            losses.save(recipe, folder, device, Path(arguments.save_losses))
            print(f"losses of the training images: {arguments.save_losses}")
    result = RunResult.read(folder.path)
    print(
        f"{result.score:.2f} % {recipe.score_name}; FLOPs {result.flops[0]:.3f} of full training per pruned step, "
        f"{result.cost:.3f} per "
        f"run; {result.seconds:.0f} s of training, {result.waited:.1%} of it waiting for data"
    )
    return 0


def default_folder(recipe: Recipe) -> Path:
    """runs/RECIPE-METHOD-RATIO-sSEED."""
    pruned = [str(recipe.ratios).replace(" ", "-")] if recipe.prunes else []
    method = recipe.method if pruned else "full"
    repeated = ["equal-steps"] if recipe.repeats else []
    return Path("runs") / "-".join([recipe.name, method, *pruned, *repeated, f"s{recipe.seed}"])


def _on_subset(recipe: Recipe, arguments: argparse.Namespace) -> Recipe:
    """The recipe on the subset that the options, or the recipe itself, name."""
    from ..coresets.chosen import pinned

    if arguments.subset is not None:
        if arguments.method is not None or arguments.prune_ratio is not None:
            raise ValueError("--subset FILE says by which method and at what ratio; drop --method and --prune-ratio")
        recipe = recipe.with_settings({"coreset.file": arguments.subset, "coreset.content": None})
    if arguments.equal_steps:
        if recipe.coreset.file is None:
            raise ValueError("--equal-steps is about a subset; name it with --subset FILE")
        recipe = recipe.with_settings({"coreset.equal_steps": True})
    return pinned(recipe)


def _what(recipe: Recipe) -> str:
    length = f"{recipe.length:,} {recipe.unit}s of batches of {recipe.batch_size}"
    if not recipe.prunes:
        return f"full data, {length}"
    if recipe.pruning is None:
        return f"{recipe.method}, {1 - recipe.mean_ratio:.1%} of the samples of {length}"
    if recipe.chosen_once:
        share = f"{1 - recipe.mean_ratio:g} of the training images, chosen once ({recipe.coreset.file})"
        as_many = "as many steps as" if recipe.repeats else "fewer steps than"
        return f"{recipe.method}, {share}, {as_many} {length} of all"
    start, stop = recipe.schedule.start, recipe.schedule.stop
    where = f" at {recipe.cut}" if recipe.pruning is not None and recipe.pruning.needs == "features" else ""
    window = f"{recipe.unit}s {start}-{recipe.length if stop is None else stop}"
    return f"{recipe.method}{where}, p = {recipe.ratios} in {window}, {length}"


def _again() -> str:
    from ..training.session import command_line

    command = command_line()
    return command if "--resume" in command.split() else f"{command} --resume"
