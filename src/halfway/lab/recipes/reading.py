"""Recipes and settings as text: YAML files, and words of a command line.

Those that ship with halfway are beside this file; a path to a YAML file works as well, and so does the `config.yaml` of
a run. A recipe may say `extends: other` and then only what differs. Any setting can be replaced by `key=value`, with
dots for sections: `optimizer.lr=0.05`, `density.noise=0.1`, `cut=layer2`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...errors import did_you_mean
from .conversion import merged
from .schema import Recipe, from_dict

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The shipped recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> Recipe:
    """A recipe by its name, or from a YAML file."""
    content = _read(name)
    content.setdefault("name", Path(name).stem)
    return from_dict(content)


def parse_settings(words: Iterable[str]) -> dict[str, Any]:
    """`["optimizer.lr=0.1"]` as a dict; values are YAML, so that numbers are numbers and [1, 2] is a list."""
    changes = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ValueError(f"settings are given as key=value, like optimizer.lr=0.05; got {word!r}")
        changes[key.strip()] = parse_value(value)
    return changes


def parse_value(text: str) -> Any:
    """A value as YAML reads it; also 1e-3, which YAML takes for a string."""
    import yaml

    if "e" in text.lower():
        with contextlib.suppress(ValueError):
            return float(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"{text!r} is not a value; lists are written [1, 2], and odd text in quotes") from None


def dump(recipe: Recipe) -> str:
    """The recipe as YAML; `load` gives the same recipe back."""
    import yaml

    return yaml.safe_dump(recipe.as_dict(), sort_keys=False, width=100)


def _read(name: str, beside: Path = Path(), extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The settings in a file, merged over those it extends. extending: the chain of files that led here."""
    import yaml

    path = beside / name if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        if path.parent != FOLDER:
            raise FileNotFoundError(f"no recipe file {str(path)!r}")
        raise ValueError(f"no recipe {name!r}; {did_you_mean(name, names())} (or give a path to a .yaml file)")
    files = (*extending, path.resolve())
    if files[-1] in extending:
        circle = " extends ".join(file.name for file in files[files.index(files[-1]) :])
        raise ValueError(f"a recipe cannot extend itself: {circle}; remove one of these `extends`")
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path.name} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no settings; a recipe looks like those in {FOLDER.name}/")
    parent = content.pop("extends", None)
    if parent is None:
        return content
    if not isinstance(parent, str):
        raise ValueError(f"{path.name}: extends takes the name of a recipe or of a .yaml file, got {parent!r}")
    inherited = _read(parent, path.parent, files)
    if "paper" in content:  # its numbers belong together
        inherited.pop("paper", None)
    return merged(inherited, content)
