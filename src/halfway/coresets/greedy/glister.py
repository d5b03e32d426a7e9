"""Samples whose gradients lower the loss on a validation set.

Shape suffixes: n samples, V of them for validation, C classes, E = D + 1 features and a one.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import torch
from torch import Tensor

from ..base import Greedy, Picked
from ..budgets import Group
from ..evidence import Evidence
from ..last_layer import factors, with_one
from ..outputs import errors


class Glister(Greedy):
    """Add the samples whose gradients point where the validation loss falls.

    What: on the last linear layer, with g its gradient for one sample and theta its parameters: 10 % of each class are
        set aside for validation; each of 100 rounds adds 1 % of the whole budget, in equal shares of the classes'
        budgets (in turns, where that is less than a sample of each): of each class the samples with the largest g . G;
        then G, the gradient of the mean validation loss, is renewed at theta - lr / m times the sum of g over the
        chosen, with m the whole budget.
    Source: Killamsetty et al., "GLISTER: Generalization based Data Subset Selection for Efficient and Robust Learning",
        AAAI 2021. They choose again in the course of training, take single steps of their own step size from a real
        validation set, and look at a random part of the candidates in each round; here once, at all of them.
    Cost: a whole training of the network, a forward pass over all samples; in each round a product of n (D + 1) C.
    Caveats: the validation samples are never chosen, so keep is at most 1 - validation. The number of rounds does not
        depend on what is retained. A trained network's gradients are small, and the choice then hangs on few validation
        samples. The last layer's bias counts as one more feature, and logits are taken as that layer gives them: for a
        classifier without bias, or with scaled logits (`speedrun-cifar10`), it is an approximation.

    Args:
        validation: the share of each class that is set aside.
        every: the share of the budget after which the gradient is renewed.
        lr: the length of the step.
    """

    name = "glister"
    needs = "long run"
    uses = ("features_ND", "logits_NC")

    def __init__(self, validation: float = 0.1, every: float = 0.01, lr: float = 0.1) -> None:
        if not 0 < validation < 1:
            raise ValueError(f"validation is the share of the samples to set aside, in (0, 1), got {validation}")
        if not 0 < every <= 1:
            raise ValueError(f"every is a share of the budget, in (0, 1], got {every}")
        if not lr > 0:
            raise ValueError(f"lr must be positive, got {lr}")
        self.validation, self.every, self.lr = validation, every, lr

    def check(self, parts: list[Group], class_balance: bool) -> None:
        super().check(parts, class_balance)
        for group in parts:
            size, aside = len(group.ids), self._aside(group)
            if group.budget > size - aside:
                raise ValueError(
                    f"{group.budget} of {size} samples of a class are to be retained, and {aside} are set aside for "
                    f"validation; take a keep below {1 - self.validation:.3g}, or a smaller validation="
                )

    def _aside(self, group: Group) -> int:
        return max(1, round(self.validation * len(group.ids)))

    def pick(self, evidence: Evidence, parts: list[Group], generator: torch.Generator) -> Picked:
        candidates, judges = [], []
        for group in parts:
            shuffled = group.ids[torch.randperm(len(group.ids), generator=generator)]
            aside = self._aside(group)
            judges.append(shuffled[:aside])
            candidates.append(shuffled[aside:])
        panel = _Panel(evidence, torch.cat(judges))
        counts = [group.budget for group in parts]
        return Picked(self._rounds(evidence, candidates, counts, panel))

    def _rounds(self, evidence: Evidence, candidates: list[Tensor], counts: list[int], panel: _Panel) -> Tensor:
        found: list[Tensor] = []
        for shares in turns(counts, round(1 / self.every)):
            gradient_CE = panel.gradient()
            step_CE = torch.zeros_like(gradient_CE)
            for c, share in shares.items():
                errors_nC, features_nE = factors(evidence, candidates[c])
                # g . G without g: e^T G phi~. Stable, so that equal samples stay in their random order.
                gains_n = ((errors_nC @ gradient_CE) * features_nE).sum(1)
                order = gains_n.argsort(descending=True, stable=True)
                best, rest = order[:share], order[share:].sort().values
                step_CE += errors_nC[best].T @ features_nE[best]
                found.append(candidates[c][best])
                candidates[c] = candidates[c][rest]
            panel.move(-self.lr / sum(counts) * step_CE)
        return torch.cat(found)


def turns(counts: list[int], rounds: int) -> list[dict[int, int]]:
    """In each round how many samples each class adds: together the same share of the budget, all classes evenly."""
    # When each class adds its next sample, as a share of the whole; equally large classes one after another.
    when = [(torch.arange(n, dtype=torch.float64) + (c + 0.5) / len(counts)) / n for c, n in enumerate(counts)]
    classes = torch.repeat_interleave(torch.tensor(counts))[torch.cat(when).argsort(stable=True)]
    ends = [len(classes) * r // rounds for r in range(rounds + 1)]
    return [dict(sorted(Counter(classes[a:b].tolist()).items())) for a, b in pairwise(ends)]


class _Panel:
    """The validation samples, and the last layer as it moves."""

    def __init__(self, evidence: Evidence, ids: Tensor) -> None:
        assert evidence.logits_NC is not None
        assert evidence.features_ND is not None
        self._labels_V = evidence.labels_N[ids]
        self._features_VE = with_one(evidence.features_ND[ids])
        self._logits_VC = evidence.logits_NC[ids].to(self._features_VE.dtype)

    def gradient(self) -> Tensor:
        """(C, E) of the mean validation loss."""
        return errors(self._logits_VC, self._labels_V).T @ self._features_VE / len(self._labels_V)

    def move(self, step_CE: Tensor) -> None:
        """Add a step to the layer's parameters."""
        self._logits_VC = self._logits_VC + self._features_VE @ step_CE.T
