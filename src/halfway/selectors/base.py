"""What a selector is: something that chooses the samples of a batch that stay.

It declares what it needs to see (`needs`), chooses (`select`), and may learn once the choice is made: from the choice
(`learn`), from the losses the user reports (`observe`), from the input of a layer (`note`). Everything else, from
running the shallow layers to cutting the batch, is up to the blocker. Settings, state and agreement between processes
come with the base classes and with `SampleMemory`.

Derive from `Ranking` for a score per sample, from `OutputRanking` for a score computed from the model's outputs, and
from `Selector` for rows that are chosen jointly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from .. import functional
from ..batches.inputs import Call
from ..settings import plain_settings, recorded_settings
from ..state.flags import StickyFlag
from ..state.ranks import ALONE, Ranks
from ..state.sample_memory import SampleMemory
from .tools.losses import LossFunction, cross_entropy, per_sample

_Memory = TypeVar("_Memory", bound=SampleMemory)


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
    ranks: the processes that train together, each with its own samples.
    outputs: what the model returns for all samples, detached; None unless `needs` says "outputs".
    targets: the part of the batch that holds them; None if there is none or the selector does not use targets.
    watched: (B, ...) input of the module that the selector watches; None unless `needs` says "outputs".
    call: what goes to the model, as it is and of some rows (`call.part(rows)`); None before samples are loaded.
    """

    size: int
    generator: torch.Generator
    features: Tensor | None = None
    ids: Tensor | None = None
    ranks: Ranks = ALONE
    outputs: Any = None
    targets: Any = None
    watched: Tensor | None = None
    call: Call | None = None

    @property
    def required_ids(self) -> Tensor:
        """(B,), for a selector that requires them."""
        assert self.ids is not None, "the blocker passes ids to a selector that requires them"
        return self.ids

    @property
    def required_features(self) -> Tensor:
        """(B, ...), for a selector that needs them."""
        assert self.features is not None, "the blocker passes features to a selector that needs them"
        return self.features

    @property
    def required_call(self) -> Call:
        """For a selector that needs the inputs."""
        assert self.call is not None, "the blocker passes the call to a selector that needs inputs"
        return self.call


Needs = Literal["nothing", "inputs", "features", "outputs"]
Wish = Literal["no", "optional", "required"]


class Selector:
    """Base class. A subclass sets `name` and `needs` and implements `select`. If it learns, it also implements one
    method for each thing it learns from: `learn`, `observe`, `note`.

    Attributes:
        name: what users call it.
        needs: what must have run before the choice. "nothing": the batch is cut before the model runs, or before it is
            loaded. "inputs": the batch must be loaded. "features": the shallow layers run on all samples. "outputs":
            the whole forward pass does, and only the backward is saved. A class attribute: what a method costs is known
            without an instance.
        wants_ids, wants_targets, wants_losses: whether it uses them ("no", "optional", "required"). Losses are those of
            `blocker.observe(losses)`.
        target: which part of the batch holds the targets: a position or a name; None: the second part, or the first
            of the usual names (labels, target, ...).
    """

    name: ClassVar[str]
    needs: ClassVar[Needs] = "nothing"
    wants_ids: Wish = "no"
    wants_targets: Wish = "no"
    wants_losses: Wish = "no"
    target: int | str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = plain_settings(recorded_settings(cls.__init__))  # type: ignore[method-assign]

    def bind(self, layer_name: str, layer: nn.Module) -> None:
        """Called once by the blocker, with the layer the features will come from."""

    def watches(self, root: nn.Module) -> nn.Module | None:
        """The module of the model whose input this selector wants to see; None for none. Called once, before `bind`:
        here a selector can look at the model.

        A selector that needs outputs finds it in `Candidates.watched`, for all samples. One that needs nothing gets it
        in `note` during the model's own call, for the retained samples.
        """
        return None

    def select(self, candidates: Candidates, count: int) -> Selection:
        """Choose exactly `count` of the candidates."""
        raise NotImplementedError

    # ----------------------------------------------------- what it may learn from

    def learn(self, candidates: Candidates, retained: Tensor | None) -> None:
        """Learn from the choice: called after each training batch with the retained rows (S,), None if all stayed.

        What is learned must be the same on all of `candidates.ranks`.
        """

    def note(self, candidates: Candidates, retained: Tensor | None, watched: Tensor) -> None:
        """Learn from the input (S, ...) of the watched module in the model's call, rows as in `retained`."""

    def observe(self, candidates: Candidates, retained: Tensor | None, losses: Tensor) -> None:
        """Learn from the losses (S,) of the retained rows that the user reports by `blocker.observe(losses)`."""

    def remember(self, name: str, memory: _Memory) -> _Memory:
        """Call this in `__init__`: `memory` becomes part of the state, as `name`, and of `check`. Returns it."""
        self._memories[name] = memory
        return memory

    # ------------------------------------------------------- what comes by itself

    def config(self) -> dict[str, Any]:
        """The settings as plain values; a state only loads into a selector with the same ones. By default the
        constructor's arguments, with functions by name."""
        settings: dict[str, Any] = vars(self).get("_settings", {})
        return {name: _named(value) if callable(value) else value for name, value in settings.items()}

    def spent_flops(self) -> float:
        """What models of its own have computed since this was last asked. 0 for most; the blocker adds it to the cost
        of a selector that needs inputs."""
        return 0.0

    def diagnostics(self) -> dict[str, float]:
        """Figures about the choices so far, for `stats`; empty if there are none. May wait for the device."""
        return {}

    def explanation(self) -> str:
        """What it does at the moment, and why, for `stats`; "" for most. May wait for the device."""
        return ""

    def check(self) -> None:
        """Raise what went wrong on the device since the last check. May wait for the device."""
        for memory in self._memories.values():
            memory.check()

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as tensors and plain values. Shapes never change if the number of samples is known, because
        checkpoints are often loaded in place."""
        return {name: memory.values for name, memory in self._memories.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned. A state that does not fit is an error and changes nothing."""
        mine = sorted(self.state_dict())
        if sorted(state) != mine:
            raise ValueError(f"the state of the selector {self.name!r} has {mine}, this one has {sorted(state)}")
        for name, memory in self._memories.items():  # check all of them before any is loaded
            memory.checked({"values": state[name]})
        for name, memory in self._memories.items():
            memory.load_state_dict({"values": state[name]})

    @cached_property  # not made in the constructor, which a subclass may forget to call
    def _memories(self) -> dict[str, SampleMemory]:
        return {}


class Ranking(Selector):
    """Retains the samples of the largest importance. A subclass implements `importance`.

    If an importance is not finite, that step draws at random, and the next `check` raises. Nothing waits for the device
    in between.
    """

    def importance(self, candidates: Candidates) -> Tensor:
        """(B,), larger is more important."""
        raise NotImplementedError

    def select(self, candidates: Candidates, count: int) -> Selection:
        importance_B = self.finite_or_random(self.importance(candidates), candidates)
        return Selection(functional.retain(importance_B, count), importance_B)

    def finite_or_random(self, values_B: Tensor, candidates: Candidates) -> Tensor:
        """(B,) as they are; uniform random numbers for all samples if a single value is not finite."""
        chance_B = torch.rand(candidates.size, generator=candidates.generator, device=candidates.generator.device)
        finite = functional.all_finite(values_B)
        self._not_finite.note(~finite)
        return torch.where(finite, values_B, chance_B.to(values_B))

    def check(self) -> None:
        super().check()
        if self._not_finite.take():
            raise FloatingPointError(
                f"the selector {self.name!r} met losses or outputs that are not finite (NaN or infinite). Such steps "
                "prune at random; the training itself has probably diverged: lower the learning rate, clip gradients, "
                "or check the inputs"
            )

    @cached_property
    def _not_finite(self) -> StickyFlag:
        return StickyFlag()


class OutputRanking(Ranking):
    """Ranks by something computed from the model's outputs and the targets.

    Such a selector pays for the forward pass of all samples: a step that prunes the share p costs (1 - p) + p F/T, with
    F the *whole* forward, about a third of a training step T. Only the backward pass of the pruned samples is saved.

    Args:
        loss_fn: loss_fn(outputs, targets) -> (B,), one loss per sample; None: cross-entropy, in segmentation the mean
            over an image's labelled pixels.
        target: which part of the batch holds the targets, see `Selector`.
    """

    needs: ClassVar[Needs] = "outputs"
    wants_targets = "required"

    def __init__(self, loss_fn: LossFunction | None = None, target: int | str | None = None) -> None:
        self.loss_fn = loss_fn
        self.target = target

    def losses(self, candidates: Candidates) -> Tensor:
        """(B,) float32, one loss per sample."""
        if self.loss_fn is None:
            return cross_entropy(candidates.outputs, candidates.targets).float()
        found = self.loss_fn(candidates.outputs, candidates.targets)
        return per_sample(found, candidates.size, "what loss_fn returns").float()


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """What a selector computes is no part of the training: without a graph, and in full precision, whatever the loop
    has set around the call."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def retained_rows(values: Tensor, retained: Tensor | None) -> Tensor:
    """(B, ...) cut to the retained rows (S, ...); all of them if `retained` is None."""
    return values if retained is None else values.index_select(0, retained.to(values.device))


def random_rows(candidates: Candidates, count: int) -> Selection:
    """`count` rows drawn uniformly without replacement."""
    generator = candidates.generator
    order = torch.randperm(candidates.size, generator=generator, device=generator.device)
    return Selection(order[:count].sort().values)


def _named(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
