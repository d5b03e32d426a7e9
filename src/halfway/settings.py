"""Settings are stored as plain numbers and strings. A state only loads where the settings are the same.

Settings often arrive as NumPy numbers, fractions, or tensors and arrays without axes (from a sweep, a YAML file, a
calculation). Training would run for an epoch with them and then fail to write its state. So they become plain Python
when an object is constructed, and anything that is not a number is an error at that point.
"""

from __future__ import annotations

import functools
import inspect
import json
import numbers
import operator
import sys
from collections.abc import Callable
from typing import Any, ParamSpec

from torch import Tensor

_P = ParamSpec("_P")

_IN_WORDS = {"int": "a whole number", "float": "a number", "bool": "True or False", "None": "None"}
_NUMBERS = {"int", "float", "bool"}


def plain_settings(init: Callable[_P, None]) -> Callable[_P, None]:
    """Decorates an `__init__`: arguments annotated as int, float or bool (or a union with one, such as `int | None`)
    are converted to plain Python; one that cannot be is an error that names it."""

    @functools.cache
    def read() -> tuple[inspect.Signature, dict[str, set[str]]]:  # when it is first needed, not with every import
        signature = inspect.signature(init)
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        settings = list(signature.parameters.values())[1:]
        return signature, {p.name: _kinds(p.annotation) for p in settings if p.kind not in several}

    @functools.wraps(init)
    def plain_init(*args: _P.args, **kwargs: _P.kwargs) -> None:
        signature, kinds = read()
        bound = signature.bind(*args, **kwargs)
        for name in bound.arguments.keys() & kinds.keys():
            bound.arguments[name] = _plain(name, bound.arguments[name], kinds[name])
        init(*bound.args, **bound.kwargs)

    return plain_init


def recorded_settings(init: Callable[_P, None]) -> Callable[_P, None]:
    """Decorates an `__init__`: records its arguments by name, defaults included, in the object's `_settings`. If the
    `__init__`s of base classes are decorated too, only the outermost one records."""

    @functools.cache
    def signature() -> inspect.Signature:
        return inspect.signature(init)

    @functools.wraps(init)
    def recording(*args: _P.args, **kwargs: _P.kwargs) -> None:
        own: dict[str, Any] = vars(args[0])
        if "_settings" not in own:
            bound = signature().bind(*args, **kwargs)
            bound.apply_defaults()
            several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            own["_settings"] = {
                name: value
                for name, value in list(bound.arguments.items())[1:]
                if signature().parameters[name].kind not in several
            }
        init(*args, **kwargs)

    return recording


def whole(name: str, value: Any) -> int:
    """`value` as an int; anything but a whole number is an error that names `name`."""
    return _plain(name, value, {"int"})


def from_0(name: str, value: Any) -> int:
    """`value` as an int of at least 0."""
    found = whole(name, value)
    if found < 0:
        raise ValueError(f"{name} must be at least 0, got {found}")
    return found


def number(name: str, value: Any) -> float:
    """`value` as a float; anything but a number is an error that names `name`."""
    return _plain(name, value, {"float"})


def share(name: str, value: Any) -> float:
    """`value` as a float in [0, 1)."""
    found = number(name, value)
    if not 0 <= found < 1:
        raise ValueError(f"{name} is the share of samples to prune and must be in [0, 1), got {value}")
    return found


def as_number(value: Any) -> int | float | None:
    """The int, float or bool that `value` stands for; None if it is not a single number."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Tensor):
        return as_number(value.detach().item()) if value.ndim == 0 else None
    if isinstance(value, numbers.Integral):
        return operator.index(value)
    decimal = sys.modules.get("decimal")  # if it was never imported, `value` is no Decimal
    if isinstance(value, numbers.Real) or (decimal is not None and isinstance(value, decimal.Decimal)):
        return float(value)
    return as_number(value.item()) if _is_numpys(value) else None


def _is_numpys(value: Any) -> bool:
    """Whether this is a NumPy scalar, or an array that holds one. Does not import NumPy."""
    return not isinstance(value, Tensor) and getattr(value, "ndim", None) == 0 and hasattr(value, "item")


def _kinds(annotation: Any) -> set[str]:
    """The names of the types in an annotation: {"int", "None"} for `int | None`."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return {part.partition("[")[0].strip() for part in text.split("|")}


def _plain(name: str, value: Any, kinds: set[str]) -> Any:
    if not kinds & _NUMBERS:
        # Not annotated as a number, but a NumPy scalar is still better stored as plain Python.
        return value.item() if _is_numpys(value) else value
    found = as_number(value)
    if isinstance(found, bool):
        if "bool" in kinds:
            return found
    elif found is not None:
        if "int" in kinds and isinstance(found, int):
            return found
        if "float" in kinds:
            return float(found)
        if "bool" in kinds and found in (0, 1):
            return bool(found)
    elif kinds - _NUMBERS - {"None"} if value is not None else "None" in kinds:
        return value
    expected = [_IN_WORDS.get(kind, f"a {kind}") for kind in sorted(kinds, key=_order)]
    raise TypeError(f"{name} must be {' or '.join(expected)}, got {value!r}")


def _order(kind: str) -> tuple[bool, str]:
    return kind == "None", kind


def as_json(settings: dict[str, Any], owner: str) -> str:
    """Settings as text for a state (`torch.distributed.checkpoint` would flatten a dict). An error names a setting that
    a state cannot hold."""
    for name, value in settings.items():
        try:
            json.dumps(value, default=_json_number)
        except (TypeError, ValueError):
            raise TypeError(
                f"the setting {name!r} of a {owner} is {value!r}, which a state cannot hold; let config() return "
                "numbers, words, True, False or None"
            ) from None
    return json.dumps(settings, default=_json_number)


def _json_number(value: Any) -> int | float:
    found = as_number(value)
    if found is None:
        raise TypeError
    return found


def require_same_config(found: Any, mine: dict[str, Any], owner: str) -> None:
    """Raise unless a state was saved with these settings.

    Args:
        found: the settings in the state, from `as_json`.
        mine: the settings of the object that loads it.
        owner: what the object is called in the error message.
    """
    mine = json.loads(as_json(mine, owner))
    try:
        theirs = dict(json.loads(found))
    except (TypeError, ValueError):
        raise ValueError(f"this is not the state_dict of a {owner}: its config is {found!r}") from None
    differences = [
        f"{key}: {theirs.get(key)!r} in the state, {mine.get(key)!r} here"
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key) != theirs.get(key)
    ]
    if differences:
        raise ValueError(f"the state belongs to another configuration ({'; '.join(differences)})")
