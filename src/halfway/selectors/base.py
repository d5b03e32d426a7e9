"""What a selector is: something that chooses the samples of a batch that stay.

It says what it needs to see (`needs`), chooses (`select`) and may learn once the choice is made (`learn`).
Everything else, from running the shallow layers to cutting the batch, is the blocker's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..ranks import ALONE, Ranks


@dataclass(frozen=True)
class Selection:
    """The choice of one step.

    indices: (S,) int64, sorted: the rows of the batch that are retained.
    importance: (B,) score of every sample, larger is more important; None where rows are chosen jointly.
    weights: (S,) factors for the retained samples' losses; None unless the selector re-weights.
    """

    indices: Tensor
    importance: Tensor | None = None
    weights: Tensor | None = None


@dataclass(frozen=True)
class Candidates:
    """The samples of one step as a selector sees them.

    size: B.
    generator: this step's randomness, on the device of the batch: a function of (seed, step, rank) alone.
    features: (B, ...) output of the cut layer; None unless `needs` says "features".
    ids: (B,) sample ids, if the user passed them.
    ranks: the processes that train together, each with samples of its own.
    """

    size: int
    generator: torch.Generator
    features: Tensor | None = None
    ids: Tensor | None = None
    ranks: Ranks = ALONE


class Selector:
    """Base class. A subclass sets `name` and `needs` and implements `select`."""

    name: ClassVar[str]
    needs: ClassVar[Literal["nothing", "features"]] = "nothing"

    def bind(self, layer_name: str, layer: nn.Module) -> None:
        """Told once, by the blocker, where the features will come from."""

    def select(self, candidates: Candidates, count: int) -> Selection:
        """Choose exactly `count` of the candidates."""
        raise NotImplementedError

    def learn(self, candidates: Candidates, retained: Tensor | None) -> None:
        """Called after each training batch with the retained rows (S,), or None when all of them stayed.

        What is learned must be the same on all of `candidates.ranks`.
        """

    def learn_nothing(self, ranks: Ranks) -> None:
        """Stands for `learn` on a rank that has no batches left, so that the others do not wait for it."""

    def check(self) -> None:
        """Raise what went wrong on the device since the last check. May wait for the device."""

    def config(self) -> dict[str, Any]:
        """The settings, as plain values: a state is only loaded into the same ones."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""


def random_rows(candidates: Candidates, count: int) -> Selection:
    """`count` rows drawn uniformly without replacement."""
    generator = candidates.generator
    order = torch.randperm(candidates.size, generator=generator, device=generator.device)
    return Selection(order[:count].sort().values)


def not_finite(layer_name: str) -> str:
    """What to say about features that are not finite."""
    return (
        f"the features of layer {layer_name!r} contain values that are not finite (NaN or infinite). Such steps prune "
        "at random and teach the selector nothing; the training itself has probably diverged: lower the learning rate, "
        "clip gradients, or check the inputs"
    )
