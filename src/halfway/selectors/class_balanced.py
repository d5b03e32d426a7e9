"""Rare classes as often as frequent ones: the usual remedy for a long tail, as a way to prune. No model looks first.

Shape suffixes: B candidates, S retained, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..settings import whole
from ..state.flags import StickyFlag
from .base import Candidates, Selection, Selector, random_rows
from .tools.class_targets import ClassTargets
from .tools.draw import inclusion_probabilities, systematic

By = Literal["draws", "weights"]


class ClassBalanced(Selector):
    """Evens out the classes, either by whom it draws or by the weights of the losses.

    What: a class with n samples counts n^q instead of n. By draws: sample i stays with probability exactly
        min(1, c n_i^(q-1)), n_i the size of its class, where c makes them add up to S (systematic sampling). By
        weights: S samples are drawn uniformly, and `blocker.last.weights` is n_i^(q-1), times what makes its mean over
        all data 1. With q = 0 all classes count the same, q = 0.5 is square-root sampling, q = 1 is `Random`.
    Source: Kang et al., "Decoupling Representation and Classifier for Long-Tailed Recognition", ICLR 2020, has the
        family n^q. They draw whole batches with replacement, so that images of rare classes repeat; here each is in a
        batch at most once, and a class cannot be drawn more often than it comes.
    Cost: 1 - p, nothing is run on pruned samples. No ids and no memory.
    Caveats: for test data in which rare classes count as much as frequent ones; otherwise it trains for the wrong
        question. By weights, the loss must use them, `(losses * blocker.last.weights).mean()`; a trainer with a loss of
        its own does not. Steps that prune nothing have none (`blocker.last` is None), so prune in all epochs.

    Args:
        q: from 0, classes count the same, to 1, as they come.
        by: "draws" or "weights".
        class_counts: how many samples each class has in the data set, `torch.bincount(labels)`; None: as many as in the
            batch at hand, which is a poor estimate where a batch has few samples of a class.
        target: which part of the batch holds the classes, see `Selector`: integers (B,), where negative ones are no
            label, or probabilities (B, C), of which the largest counts. A sample without a label weighs 1, like the
            average one.
    """

    name = "class_balanced"
    wants_targets = "required"

    def __init__(
        self,
        q: float = 0.0,
        by: By = "draws",
        class_counts: Sequence[int] | Tensor | None = None,
        target: int | str | None = None,
    ) -> None:
        if not 0 <= q <= 1:
            raise ValueError(f"q must lie in [0, 1]: 0 evens the classes out, 1 leaves them as they come; got {q}")
        if by not in get_args(By):
            raise ValueError(f"by must be one of {', '.join(map(repr, get_args(By)))}, got {by!r}")
        counts = None if class_counts is None else _counts(class_counts)
        self.q = q
        self.by = by
        self.class_counts = counts
        self.target = target
        self._w_C: Tensor | None = None
        self._classes, self._beyond = ClassTargets(self), StickyFlag()

    def select(self, candidates: Candidates, count: int) -> Selection:
        weights_B = self._weights(candidates)
        if self.by == "weights":
            rows_S = random_rows(candidates, count).indices
            return Selection(rows_S, weights=weights_B.index_select(0, rows_S).float())
        pi_B = inclusion_probabilities(weights_B, count)
        return Selection(systematic(pi_B, count, candidates.generator), pi_B)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "class_counts": self.class_counts}

    def check(self) -> None:
        super().check()
        self._classes.check()
        if self._beyond.take():
            raise ValueError(
                f"the selector {self.name!r} met a class beyond the last of its class_counts {self.class_counts}; pass "
                "the counts of all classes"
            )

    def _weights(self, candidates: Candidates) -> Tensor:
        """(B,) float64: n^(q-1) of the class of each sample, with a mean over all labelled data of 1; 1 without a
        label."""
        classes_B = self._classes.of(candidates)
        labelled_B = classes_B >= 0
        if self.class_counts is None:
            n_B = (classes_B.unsqueeze(0) == classes_B.unsqueeze(1)).sum(1).to(torch.float64)
            w_B = n_B ** (self.q - 1)
            mean = (w_B * labelled_B).sum() / labelled_B.sum().clamp_min(1)
            return torch.where(labelled_B, w_B / mean, 1.0)
        w_C = self._class_weights(classes_B.device)
        within_B = labelled_B & (classes_B < len(w_C))
        self._beyond.note((labelled_B & ~within_B).any())
        return torch.where(within_B, w_C[classes_B.clamp(0, len(w_C) - 1)], 1.0)

    def _class_weights(self, device: torch.device) -> Tensor:
        """(C,) float64, moved to the device once: a copy in every step would wait for it."""
        if self._w_C is None or self._w_C.device != device:
            n_C = torch.tensor(self.class_counts, dtype=torch.float64, device="cpu")
            w_C = n_C.clamp_min(1) ** (self.q - 1)  # a class that the data have none of is as rare as one of one sample
            self._w_C = (w_C * n_C.sum() / (w_C * n_C).sum()).to(device)
        return self._w_C


def _counts(given: Any) -> list[int]:
    """The numbers of samples by class, as plain ones."""
    by_position = isinstance(given, Sequence | Tensor) or getattr(given, "ndim", None) == 1
    if by_position and getattr(given, "ndim", 1) == 1:
        counts = [whole("class_counts", n) for n in given]
        if len(counts) > 1 and min(counts) >= 0 and sum(counts) > 0:
            return counts
    raise ValueError(
        "class_counts is how many samples each of two or more classes has, in the order of the classes, as "
        f"torch.bincount(labels) gives it; got {given!r}"
    )
