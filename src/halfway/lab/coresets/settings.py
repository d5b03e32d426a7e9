"""What a recipe says about a subset that was chosen before the training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CoresetSettings:
    """The `coreset` section of a recipe.

    file: the subset to train on (`halfway coreset` makes it); a path.
    content: what it must hold, filled in by the commands: a run goes on only with the same subset, wherever it is.
    weights: multiply losses by the weights that a method gives its samples, where it gives any.
    equal_steps: as many steps as on all data, so more epochs. False: as many epochs, so fewer steps.
    small: for `halfway compare`, the network of a method that needs a small one: {options: {width: 8}}.
    proxy_epochs: for `halfway compare`, the length of the proxies' trainings; None: the recipe's.
    class_balance: for `halfway compare`, whether every class retains the same share.
    record: for `halfway compare`, the run folder whose record `retention` reads.
    """

    file: str | None = None
    content: str | None = None
    weights: bool = True
    equal_steps: bool = False
    small: dict[str, Any] = field(default_factory=dict)
    proxy_epochs: int | None = None
    class_balance: bool = True
    record: str | None = None
