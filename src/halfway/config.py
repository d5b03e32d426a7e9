"""Settings in a state: it is only loaded where they are the same."""

from __future__ import annotations

import json
from typing import Any


def refuse_another(found: Any, mine: dict[str, Any], owner: str) -> None:
    """Raise unless the settings in a state are one's own.

    Args:
        found: what the state holds, JSON (a dict would be flattened by `torch.distributed.checkpoint`).
        mine: the settings here, as plain values.
        owner: whose state it should be, for the message.
    """
    mine = json.loads(json.dumps(mine))
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
