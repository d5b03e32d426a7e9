"""How often each training sample was in a pruned batch, and how often it stayed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..data import TrainSet
from .rank import rank_and_size


class Retention:
    """Counts per sample, and per class over time.

    offered, retained: (N,) int64, so far.
    class_offered, class_retained: a (C,) tensor per round; empty where classes are unknown.
    """

    def __init__(self, train: TrainSet, device: torch.device) -> None:
        self._train = train
        self.offered = torch.zeros(len(train), dtype=torch.int64)
        self.retained = torch.zeros(len(train), dtype=torch.int64)
        self.class_offered: list[Tensor] = []
        self.class_retained: list[Tensor] = []
        # Counts of this round, on the device of the batches, so that nothing waits for it before the round ends.
        self._round = torch.zeros(2, len(train), dtype=torch.int64, device=device)

    def note(self, ids: Tensor, indices: Tensor) -> None:
        """Count a pruned batch: the samples' ids (B,) and the retained rows (S,)."""
        ids = ids.to(self._round.device)
        self._round[0].index_add_(0, ids, torch.ones_like(ids))
        stayed = ids[indices]
        self._round[1].index_add_(0, stayed, torch.ones_like(stayed))

    def end_round(self) -> None:
        """Sum over ranks and classes."""
        if rank_and_size()[1] > 1:
            dist.all_reduce(self._round)
        offered, retained = self._round.to("cpu", copy=True)
        self._round.zero_()
        self.offered += offered
        self.retained += retained
        by_class = [self._train.per_class(counts) for counts in (offered, retained)]
        if by_class[0] is not None and by_class[1] is not None:
            self.class_offered.append(by_class[0])
            self.class_retained.append(by_class[1])

    def state_dict(self) -> dict[str, Any]:
        return {
            "offered": self.offered,
            "retained": self.retained,
            "class_offered": self.class_offered,
            "class_retained": self.class_retained,
            "round": self._round.cpu(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.offered.copy_(state["offered"])
        self.retained.copy_(state["retained"])
        self.class_offered = list(state["class_offered"])
        self.class_retained = list(state["class_retained"])
        self._round.copy_(state["round"])
