"""What a selector is: something that chooses the samples of a batch that stay.

It says what it needs to see (`needs`), chooses (`select`) and may learn once the choice is made: from the choice
(`learn`), from the losses the user reports (`observe`), from what passes through a layer (`note`). Everything else,
from running the shallow layers to cutting the batch, is the blocker's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from .. import functional as PF
from ..settings import plain_settings
from ..state.ranks import ALONE, Ranks


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
    outputs: what the model returns for all samples, detached; None unless `needs` says "outputs".
    targets: the part of the batch that holds them, for a selector that looks at targets and a batch that has them.
    watched: (B, ...) what entered the module that the selector watches; None unless `needs` says "outputs".
    """

    size: int
    generator: torch.Generator
    features: Tensor | None = None
    ids: Tensor | None = None
    ranks: Ranks = ALONE
    outputs: Any = None
    targets: Any = None
    watched: Tensor | None = None


Wish = Literal["no", "optional", "required"]


class Selector:
    """Base class. A subclass sets `name` and `needs` and implements `select`.

    Attributes:
        needs: what must have run before the choice. "nothing": the batch is cut before the model runs. "features": the
            shallow layers run on all samples. "outputs": the whole forward pass does, and only the backward is saved.
        wants_ids, wants_targets, wants_losses: whether it looks at them, and whether it can do without. Losses are
            those of `blocker.observe(losses)`.
        target: which part of the batch holds the targets: a position or a name; None: the second part, or the first
            of the usual names (labels, target, ...).
    """

    name: ClassVar[str]
    needs: Literal["nothing", "features", "outputs"] = "nothing"
    wants_ids: Wish = "no"
    wants_targets: Wish = "no"
    wants_losses: Wish = "no"
    target: int | str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = plain_settings(cls.__init__)  # type: ignore[method-assign]

    def bind(self, layer_name: str, layer: nn.Module) -> None:
        """Told once, by the blocker, where the features will come from."""

    def watches(self, root: nn.Module) -> nn.Module | None:
        """A module of the model whose input this selector wants to see, None for none.

        One that needs outputs finds it in `Candidates.watched`, for all samples. One that needs nothing is shown it in
        the model's own call, for the retained ones (`note`).
        """
        return None

    def select(self, candidates: Candidates, count: int) -> Selection:
        """Choose exactly `count` of the candidates."""
        raise NotImplementedError

    def learn(self, candidates: Candidates, retained: Tensor | None) -> None:
        """Called after each training batch with the retained rows (S,), or None when all of them stayed.

        What is learned must be the same on all of `candidates.ranks`.
        """

    def note(self, candidates: Candidates, retained: Tensor | None, watched: Tensor) -> None:
        """What entered the watched module in the model's call, (S, ...), rows as in `retained`."""

    def observe(self, candidates: Candidates, retained: Tensor | None, losses: Tensor) -> None:
        """The losses (S,) of the retained rows, as the user's `blocker.observe(losses)` reports them."""

    def learn_nothing(self, ranks: Ranks) -> None:
        """Stands for `learn`, `note` and `observe` on a rank that has no batches left: the others would wait for it."""

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


class Ranking(Selector):
    """Retains the samples of the largest importance. A subclass implements `importance`.

    In a step where an importance is not finite all samples are drawn at random, and `check` raises; nothing waits for
    the device meanwhile.
    """

    def __init__(self) -> None:
        self._not_finite: Tensor | None = None

    def importance(self, candidates: Candidates) -> Tensor:
        """(B,), larger is more important."""
        raise NotImplementedError

    def select(self, candidates: Candidates, count: int) -> Selection:
        importance_B = self.finite_or_random(self.importance(candidates), candidates)
        return Selection(PF.retain(importance_B, count), importance_B)

    def finite_or_random(self, values_B: Tensor, candidates: Candidates) -> Tensor:
        """(B,) as they are; uniform random numbers for all samples if a single value is not finite."""
        chance_B = torch.rand(candidates.size, generator=candidates.generator, device=candidates.generator.device)
        finite = values_B.isfinite().all()
        self._not_finite = ~finite if self._not_finite is None else self._not_finite | ~finite
        return torch.where(finite, values_B, chance_B.to(values_B))

    def check(self) -> None:
        found, self._not_finite = self._not_finite, None
        if found is not None and found:
            raise FloatingPointError(
                f"the selector {self.name!r} met losses or outputs that are not finite (NaN or infinite). Such steps "
                "prune at random; the training itself has probably diverged: lower the learning rate, clip gradients, "
                "or check the inputs"
            )


def retained_rows(values: Tensor, retained: Tensor | None) -> Tensor:
    """(B, ...) cut to the retained rows (S, ...); all of them if `retained` is None."""
    return values if retained is None else values.index_select(0, retained.to(values.device))


def random_rows(candidates: Candidates, count: int) -> Selection:
    """`count` rows drawn uniformly without replacement."""
    generator = candidates.generator
    order = torch.randperm(candidates.size, generator=generator, device=generator.device)
    return Selection(order[:count].sort().values)
