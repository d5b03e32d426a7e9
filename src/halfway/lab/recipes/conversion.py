"""Plain values, as YAML and the command line have them, to the settings' dataclasses and back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ...errors import did_you_mean

# A study makes thousands of recipes of a few kinds.
_hints = functools.cache(get_type_hints)


def make(kind: Any, content: Mapping[str, Any], section: str) -> Any:
    """A dataclass from a mapping; unknown keys and wrong types are errors that give the dotted name."""
    hints = _hints(kind)
    for key in content:
        if key not in hints:
            raise ValueError(f"no setting {section + str(key)!r}; {did_you_mean(str(key), hints)}")
    missing = [
        section + f.name
        for f in dataclasses.fields(kind)
        if f.name not in content and f.default is f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"the recipe does not say {', '.join(missing)}")
    return kind(**{key: _convert(value, hints[key], section + key) for key, value in content.items()})


def _convert(value: Any, hint: Any, key: str) -> Any:
    """A YAML value as what the dataclass expects."""
    choices = get_args(hint)
    origin = get_origin(hint)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ValueError(f"{key} is a section; set one of its settings, like {key}.name=...")
        return make(hint, value, f"{key}.")
    if origin is Literal:
        if value not in choices:
            raise ValueError(f"{key} must be one of {', '.join(map(str, choices))}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{key} is a list like [1, 2], got {value!r}")
        each = choices[:1] * len(value) if choices[-1] is Ellipsis else choices
        if len(each) != len(value):
            raise ValueError(f"{key} has {len(each)} values, got {value!r}")
        return tuple(_convert(v, h, key) for v, h in zip(value, each, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{key} is a section of settings, got {value!r}")
        return dict(value)
    if any(get_origin(c) is dict for c in choices):  # a number, or a section that stands for several
        return dict(value) if isinstance(value, Mapping) else _convert(value, choices[0], key)
    if type(None) in choices:
        inner = next(c for c in choices if c is not type(None))
        return None if value is None else _convert(value, inner, key)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):  # YAML reads 1e-3 as a string
        value = _number(value, key)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ValueError(f"{key} must be {_WORDS.get(hint, hint.__name__)}, got {value!r}")
    return value


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _number(text: str, key: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{key} must be a number, got {text!r}") from None


def nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """{"optimizer.lr": 0.1} as {"optimizer": {"lr": 0.1}}."""
    out: dict[str, Any] = {}
    for key, value in changes.items():
        *sections, last = key.split(".")
        inner = out
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return out


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The inverse of `nested`; lists become text."""
    out: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            out.update(flat(value, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = str(list(value)) if isinstance(value, (list, tuple)) else value
    return out


def plain(value: Any) -> Any:
    """Mappings and sequences as the dicts and lists that YAML writes."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (tuple, list)) else value


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` over `base`, section by section. A section with another `name` does not inherit options."""
    out = dict(base)
    if changes.get("name", out.get("name")) != out.get("name"):
        out.pop("options", None)
    for key, value in changes.items():
        inner = out.get(key)
        out[key] = merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return out
