"""`halfway data`: the data sets that recipes use, and fetching them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import add_command

_DESCRIPTION = """\
Without a NAME: list the data sets that the recipes use, with their size, their terms, where they are expected and
whether they are there. With a NAME: fetch that one. `--download` of every command that trains a recipe does the same
for the recipe's data set.

CIFAR-10, CIFAR-100, PASCAL VOC 2012 and the masks of SBD come from their official addresses and are checked against
their published MD5 sums. An interrupted download goes on where it stopped, and the data set appears in its place only
when it is complete. ImageNet and Cityscapes need an account, and Fashion-MNIST comes as a package or through
torchvision: their NAME prints what to do.

Without a network on this machine, download the archive elsewhere and put it into the folder: the same command checks
and unpacks it. A mirror is the address of a folder that holds the archives under their official names, given by --url
or the environment variable HALFWAY_DATA_URL.
"""
_EPILOG = """\
examples:
  halfway data                                 what there is, and what is missing in data/
  halfway data cifar10                         170 MB to data/, where recipes look for it
  halfway data voc2012 --to /datasets/voc      then: halfway train tiny-voc --data /datasets/voc
  halfway data sbd --to /datasets/voc          VOC and the masks for data.split=trainaug
  halfway data cifar100 --url https://mirror.example.org/cifar
  halfway data imagenet --to /datasets/imagenet    prints the steps
"""


def register(commands: Any) -> None:
    """Add `data` to the command line."""
    parser = add_command(commands, "data", "the data sets of the recipes, and fetching them", _DESCRIPTION, _EPILOG)
    parser.add_argument("name", nargs="?", metavar="NAME", help="fetch this one (default: list them)")
    parser.add_argument("--to", default="data", metavar="DIR", help="the folder (default: %(default)s)")
    parser.add_argument("--url", help="address of a mirror (default: HALFWAY_DATA_URL, or the official addresses)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List the data sets, or fetch one."""
    from ..data import official

    if arguments.name is None:
        print(listing(Path(arguments.to)))
        return 0
    print(f"{arguments.name}: {official.fetch(arguments.name, arguments.to, arguments.url)}")
    return 0


def listing(root: Path) -> str:
    """All data sets that recipes use, as text."""
    from ..data import SETS, official

    used_by = _used_by()
    lines = [f"data sets of the recipes, looked for in {root}/ (--to DIR: elsewhere)"]
    for name, known in official.OFFICIAL.items():
        found = known.find(root.expanduser())
        how = f"halfway data {name} --to {root}"
        lines += [
            "",
            f"{name}: {known.title}, {official.size(known.size)} to download",
            f"    there       {found}" if found is not None else f"    not there   {how} {_does(known)}",
            f"    expected    {known.expected} in {root}/",
            f"    recipes     {', '.join(used_by.pop(name, [])) or 'none'}",
            f"    terms       {known.terms}",
            f"    page        {known.page}",
        ]
    for name, recipes in used_by.items():
        lines += ["", f"{name}: {SETS[name].title}, nothing to download", f"    recipes     {', '.join(recipes)}"]
    return "\n".join(lines)


def _does(known: Any) -> str:
    return "downloads it" if known.archive is not None else "prints how to get it"


def _used_by() -> dict[str, list[str]]:
    """Names of recipes by data set; recipes that need SBD also need VOC."""
    from ..data import official
    from ..recipes import reading

    used: dict[str, list[str]] = {}
    for recipe in map(reading.load, reading.names()):
        name: str | None = official.name_for(recipe.data) or recipe.data.name
        while name is not None:
            used.setdefault(name, []).append(recipe.name)
            name = official.OFFICIAL[name].needs if name in official.OFFICIAL else None
    return used
