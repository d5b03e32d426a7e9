"""What a method is that chooses a subset once, before training.

Shape suffixes: N samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..functional import highest
from ..settings import plain_settings, recorded_settings
from .budgets import Group, groups
from .choosing import checked_scores, tie_breaker
from .coreset import Coreset
from .evidence import Evidence

Needs = Literal["nothing", "long run", "small run", "short runs", "checkpoints", "retention"]


class Picked(NamedTuple):
    """What a method picked, in any order."""

    ids: Tensor
    weights: Tensor | None = None  # one for each id


class Method(ABC):
    """Chooses a subset from evidence. Subclass `Scored` or `Greedy`.

    Attributes:
        name: as in `METHODS` and on the command line.
        needs: the trainings that the evidence comes from: "nothing"; a "long run", a whole training of the network
            itself; a "small run", a whole training of a smaller one; "short runs", ten trainings for a tenth of the
            time; "checkpoints" of one or several whole trainings; "retention", the record of a run that pruned.
            A setting can change it, so read it from the instance.
        uses: the pieces of `Evidence` that it reads: "features_ND", "logits_NC", "dynamics", "error_norms",
            "feature_norms", "gradient_norms", "checkpoints", "retention".
    """

    name: ClassVar[str]
    needs: Needs
    uses: Sequence[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = plain_settings(recorded_settings(cls.__init__))  # type: ignore[method-assign]

    @property
    def settings(self) -> dict[str, Any]:
        """The constructor's arguments by name, defaults included."""
        return dict(vars(self).get("_settings", {}))

    def check(self, parts: list[Group], class_balance: bool) -> None:  # noqa: B027 (most can choose any number)
        """Raise if it cannot choose so many of each group, before proxies are trained for it."""

    @abstractmethod
    def choose(self, evidence: Evidence, keep: float, *, class_balance: bool = True, seed: int = 0) -> Coreset:
        """Exactly round(keep N) samples.

        Args:
            evidence: has the pieces that `uses` names.
            keep: the share to retain, in (0, 1).
            class_balance: every class retains the same share of its samples.
            seed: of equal scores and of everything that is drawn.
        """

    def _coreset(
        self, evidence: Evidence, keep: float, class_balance: bool, seed: int, picked: Picked, scores_N: Tensor | None
    ) -> Coreset:
        ids, order = picked.ids.sort()
        return Coreset(
            ids=ids,
            weights=None if picked.weights is None else picked.weights[order].to(torch.float32),
            scores=scores_N,
            method=self.name,
            settings={**self.settings, "keep": float(keep), "class_balance": bool(class_balance), "seed": int(seed)},
            num_samples=evidence.num_samples,
            fingerprint=Coreset.fingerprint_of(evidence.labels_N),
        )


class Scored(Method):
    """Gives each sample a score of its own; the largest are retained."""

    @abstractmethod
    def score(self, evidence: Evidence, generator: torch.Generator | None = None) -> Tensor:
        """(N,) larger = retained. generator: only for a score that is drawn; None: seed 0."""

    def choose(self, evidence: Evidence, keep: float, *, class_balance: bool = True, seed: int = 0) -> Coreset:
        parts = groups(evidence.labels_N, keep, evidence.num_classes, class_balance)
        evidence.require(self.uses, self.name)
        generator = tie_breaker(seed)
        scores_N = checked_scores(self.score(evidence, generator))
        if len(scores_N) != evidence.num_samples:
            raise ValueError(
                f"{self.name} gave {len(scores_N)} scores for {evidence.num_samples} samples; let `score` return one "
                "of each sample, in the order of the labels"
            )
        ids = torch.cat([highest(scores_N, group.ids, group.budget, generator) for group in parts])
        return self._coreset(evidence, keep, class_balance, seed, Picked(ids), scores_N)


class Greedy(Method):
    """Chooses samples jointly, class by class.

    Attributes:
        per_class: whether `class_balance=False` is an error.
    """

    per_class: ClassVar[bool] = True

    @abstractmethod
    def pick(self, evidence: Evidence, parts: list[Group], generator: torch.Generator) -> Picked:
        """Exactly `group.budget` of the ids of each group."""

    def check(self, parts: list[Group], class_balance: bool) -> None:
        if self.per_class and not class_balance:
            raise ValueError(
                f"{self.name} chooses within each class, as its memory and time need; leave class_balance=True "
                "(drop --no-class-balance), or take a method that scores samples"
            )

    def choose(self, evidence: Evidence, keep: float, *, class_balance: bool = True, seed: int = 0) -> Coreset:
        parts = groups(evidence.labels_N, keep, evidence.num_classes, class_balance)
        self.check(parts, class_balance)
        evidence.require(self.uses, self.name)
        picked = self.pick(evidence, parts, tie_breaker(seed))
        return self._coreset(evidence, keep, class_balance, seed, picked, None)
