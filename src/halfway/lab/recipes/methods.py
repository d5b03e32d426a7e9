"""The methods a recipe can train with: full data, every selector, sampler and coreset by its name, named variants, and
controls.

A method decides within the batch (a selector, in the blocker), before the epoch (a sampler) or once, before the
training (a coreset: a file that `halfway coreset` makes). Its settings are a section of the recipe with the
implementation's name: `density.noise=0.1`, `infobatch.threshold=0.95`.

Controls spend the same on no choice at all. At a ratio p each costs 1 - p of full data, whatever the recipe's window:

    random_even            random pruning of p of every batch, from the first step to the last
    shorter                full data for 1 - p of the steps, see `controls`
    smaller_batch          all steps, with batches of 1 - p of the size; also with the learning rate scaled down
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...coresets import METHODS as CORESETS
from ...errors import did_you_mean
from ...samplers import SAMPLERS, EpochSampler
from ...selectors import SELECTORS, Selector
from ...selectors.base import Needs

FULL = "full"

# Settings that the training fills in itself, from the data, the loss and the run.
_FILLED_IN = {
    *("self", "data", "prune_ratio", "common", "target"),
    *("loss_fn", "num_samples", "num_classes", "class_counts"),
}


@dataclass(frozen=True)
class Method:
    """A method of a recipe.

    implementation: the name of a selector, sampler or coreset.
    preset: the settings that make this method a variant of it.
    even: it prunes from the first step to the last, whatever the window says.
    """

    implementation: str
    preset: Mapping[str, Any] = field(default_factory=dict)
    even: bool = False

    @property
    def before_epoch(self) -> bool:
        """Whether an epoch has fewer steps: it is a sampler, or has decided even earlier."""
        return self.implementation in SAMPLERS or self.once

    @property
    def once(self) -> bool:
        """Whether it decides once, before the training. It knows no window."""
        return self.implementation in CORESETS

    @property
    def needs(self) -> Needs:
        """What it must see of a sample before it can prune it, see `Selector.needs`."""
        return "nothing" if self.before_epoch else SELECTORS[self.implementation].needs

    def selector(self, settings: Mapping[str, Any], **known: Any) -> Selector:
        """A new selector. `known`: settings that the training can fill in; passed on if the selector takes them."""
        kind = SELECTORS[self.implementation]
        return kind(**_asked_for(kind, known), **{**settings, **self.preset})

    def sampler(self, samples: int, ratio: float, settings: Mapping[str, Any], **common: Any) -> EpochSampler:
        """A new sampler for `samples` samples."""
        return SAMPLERS[self.implementation](samples, ratio, **{**settings, **self.preset}, **common)


# The paper's name for its method, and variants with their own name in the literature or in our tables.
VARIANTS = {
    "pfb": Method("density"),
    "infobatch_dagger": Method("infobatch", {"threshold": 0.95}),
    "random_even": Method("random", even=True),
}
# Controls that train on every sample of a batch: no selector and no sampler.
SHORTER, SMALLER_BATCH, SMALLER_BATCH_SCALED = "shorter", "smaller_batch", "smaller_batch_scaled"
WHOLE_BATCHES = (SHORTER, SMALLER_BATCH, SMALLER_BATCH_SCALED)
CONTROLS = ("random_even", *WHOLE_BATCHES)
# Other names of a method. `resolve` and `find` translate them, so nothing else sees them.
ALIASES = {"density": "pfb"}
METHODS: dict[str, Method] = {
    **VARIANTS,
    **{name: Method(name) for name in (*SELECTORS, *SAMPLERS, *CORESETS) if name not in ALIASES},
}
IMPLEMENTATIONS = (*SELECTORS, *SAMPLERS, *CORESETS)


def names() -> list[str]:
    """All methods, full data first, the paper's by its own name."""
    return [FULL, *METHODS, *WHOLE_BATCHES]


def comparable() -> list[str]:
    """The methods that need no preparation: all but those that compare with the losses of another model, and `proxy`,
    which needs a small one, and coresets. Without controls, which are no methods to choose from, and `class_balanced`,
    which is random pruning where classes are even."""
    others = ("rho", "rho_remembered", "proxy", "class_balanced", *CORESETS, *CONTROLS)
    return [name for name in names() if name not in others]


def resolve(name: str) -> str:
    """The main name of a method, given any of its names; `full` is one. Unknown names are errors."""
    name = ALIASES.get(name, name)
    if name not in (FULL, *WHOLE_BATCHES) and name not in METHODS:
        raise ValueError(f"unknown method {name!r}; {did_you_mean(name, names())}")
    return name


def find(name: str) -> Method:
    """A selector, sampler or coreset as a method, by its name or an alias."""
    return METHODS[resolve(name)]


def without_window(name: str) -> bool:
    """Whether a method prunes from the first step to the last, whatever the window says."""
    return name in CONTROLS or (name in METHODS and METHODS[name].once)


def settings_of(implementation: str) -> dict[str, Any]:
    """The settings an implementation takes, with their defaults."""
    kind: Any = {**SELECTORS, **SAMPLERS, **CORESETS}[implementation]
    parameters = inspect.signature(kind).parameters
    return {name: p.default for name, p in parameters.items() if name not in _FILLED_IN}


def _asked_for(kind: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(kind).parameters
    return {name: value for name, value in known.items() if name in parameters}
