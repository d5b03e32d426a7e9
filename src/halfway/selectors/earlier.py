"""Translates states and settings of halfway 0.1.0, in which some selectors were modes of others."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from . import SELECTORS

# By the selector's former name: the setting that switched the mode, and today's name of each of its values.
_MODES: dict[str, tuple[str, dict[str, str]]] = {
    "balanced": ("features", {"cut": "balanced", "remembered": "balanced_remembered"}),
    "loss": ("sampling", {"top": "loss", "rank": "loss_rank"}),
    "last_loss": ("mode", {"soft": "last_loss", "hard": "last_loss_hard"}),
}


def settings_today(name: str, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A selector's name and settings in today's terms; current ones are returned unchanged.

    Args:
        name: of the selector.
        settings: some or all of its settings.
    """
    if name not in _MODES or _MODES[name][0] not in settings:
        return name, dict(settings)
    switch, names = _MODES[name]
    today = names.get(settings[switch], name)
    taken = inspect.signature(SELECTORS[today]).parameters
    return today, {key: value for key, value in settings.items() if key in taken}


def sections_today(method: str, sections: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The method of a recipe and its sections of settings in today's terms.

    Modes already had method names of their own then, but shared one section of settings.

    Args:
        method: of the recipe.
        sections: settings by implementation.
    """
    out = {name: dict(section) if isinstance(section, Mapping) else section for name, section in sections.items()}
    for name, (switch, names) in _MODES.items():
        section = out.get(name)
        if not isinstance(section, dict):
            continue
        if method == name and section.get(switch) in names:
            method = names[section[switch]]
        today = method if method in names.values() else name
        if switch not in section and (today == name or today in out):
            continue
        del out[name]
        taken = inspect.signature(SELECTORS[today]).parameters
        known = {key: value for key, value in section.items() if key in taken}
        if known:
            out[today] = {**known, **out.get(today, {})}
    return method, out


def config_today(config: Any) -> Any:
    """The settings in a blocker's state, as JSON, in today's terms: modes under their own names, and later settings at
    their defaults, which keep the former behaviour. Anything else is returned unchanged."""
    try:
        found = dict(json.loads(config))
        name = found["selector"]
    except (TypeError, ValueError, KeyError):
        return config
    prefix = "selector."
    settings = {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
    rest = {key: value for key, value in found.items() if not key.startswith(prefix)}
    name, settings = settings_today(name, settings)
    if name in SELECTORS:
        parameters = inspect.signature(SELECTORS[name]).parameters.values()
        settings = {**{p.name: p.default for p in parameters if p.default is not p.empty}, **settings}
    return json.dumps({**rest, "selector": name, **{f"{prefix}{key}": value for key, value in settings.items()}})
