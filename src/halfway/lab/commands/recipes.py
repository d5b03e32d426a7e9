"""`halfway recipes`: what there is to train, and what pruning will cost, beside what the paper claims."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from . import add_command

if TYPE_CHECKING:
    from ..recipes.schema import Recipe

_DESCRIPTION = """\
List the recipes with the predicted cost of PFB, counted in FLOPs on the full-size model before any training; with a
NAME, print that recipe with all its settings.

  p           pruning ratio: the paper's for this setting, or the recipe's
  F/T         FLOPs of the shallow forward relative to a whole training step
  step, run   cost relative to full data of a pruned step, and of the whole run, whose first and last part do not prune
  saved       1 - run: what we predict; beside it the share of training time that the paper says it saves
  paper       the paper's own scores: full data -> PFB at p
"""


def register(commands: Any) -> None:
    """Add `recipes` to the command line."""
    parser = add_command(commands, "recipes", "what there is to train, with predicted costs", _DESCRIPTION)
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this recipe with all its settings")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table of recipes, or one recipe."""
    from ...tables import columns, markdown
    from ..recipes import reading

    if arguments.name is not None:
        print(reading.dump(reading.load(arguments.name)), end="")
        return 0
    rows = [row for name in reading.names() for row in cost_rows(reading.load(name))]
    if arguments.markdown:
        print(markdown(COLUMNS, rows, words=2))
    else:
        print(columns(COLUMNS, rows))
        print(
            "\nhalfway train RECIPE --data DIR; full-size runs are for GPUs, the tiny ones take a minute on two cores"
        )
    return 0


COLUMNS = ("recipe", "cut", "p", "F/T", "step", "run", "saved", "paper: saved", "paper: full -> PFB")


def cost_rows(recipe: Recipe) -> list[tuple[str, ...]]:
    """A row for each of the paper's ratios, or one for the recipe's own."""
    from ..recipes.predicted_cost import predicted_cost

    paper = recipe.paper
    rows: list[tuple[str, ...]] = []
    for ratio in sorted(paper.pfb) if paper is not None else [recipe.mean_ratio]:
        cost = predicted_cost(recipe.with_settings({"prune_ratio": ratio}))
        saved = score = ""
        if paper is not None:
            saved = f"{paper.saved[ratio]:.1%}" if ratio in paper.saved else ""
            score = f"{paper.full} -> {paper.pfb[ratio]}"
        figures = (f"{cost.shallow_share:.3f}", f"{cost.step:.3f}", f"{cost.run:.3f}", f"{1 - cost.run:.1%}")
        rows.append((recipe.name, recipe.cut, f"{ratio:g}", *figures, saved, score))
    return rows
