"""Which samples are in which batch: a function of (seed, epoch) alone, so that methods are paired and runs resume."""

from __future__ import annotations

import torch
from torch import Tensor

from ...seeds import seed_of


class BatchOrder:
    """The batches of a training, for one rank.

    Args:
        samples: N, size of the training set.
        batch_size: over all ranks. Incomplete batches are left out, so that every step has the same shape.
        seed: of the run.
        rank, ranks: this process and all of them; each takes every `ranks`-th sample of a batch.
    """

    def __init__(self, samples: int, batch_size: int, seed: int, rank: int = 0, ranks: int = 1) -> None:
        if batch_size > samples:
            raise ValueError(f"batch_size={batch_size} is more than the {samples} training images; make it smaller")
        if batch_size % ranks:
            raise ValueError(
                f"batch_size={batch_size} is over all ranks and must be a multiple of their number, {ranks}"
            )
        self.samples = samples
        self.batch_size = batch_size
        self.seed = seed
        self.rank, self.ranks = rank, ranks

    @property
    def per_epoch(self) -> int:
        """Batches in an epoch."""
        return self.samples // self.batch_size

    def of_size(self, batch_size: int) -> BatchOrder:
        """The same with another batch size."""
        return BatchOrder(self.samples, batch_size, self.seed, self.rank, self.ranks)

    def only(self, ids: Tensor, epoch: int) -> Tensor:
        """This rank's share of some samples, in the order in which the epoch visits them; equally many on all ranks."""
        chosen_N = torch.zeros(self.samples, dtype=torch.bool)
        chosen_N[ids] = True
        order = self._shuffled(epoch)
        order = order[chosen_N[order]]
        return order[: len(order) // self.ranks * self.ranks][self.rank :: self.ranks]

    def _shuffled(self, epoch: int) -> Tensor:
        return torch.randperm(self.samples, generator=torch.Generator().manual_seed(seed_of(self.seed, epoch)))

    def epoch(self, epoch: int, first: int = 0, mine: Tensor | None = None) -> list[tuple[Tensor, int]]:
        """(ids, augmentation seed) of the batches of an epoch, from the `first` on.

        mine: this rank's ids in order, if a sampler has chosen them; None: its share of all samples.
        """
        if mine is None:
            mine = self._shuffled(epoch)[: self.per_epoch * self.batch_size][self.rank :: self.ranks]
        size = self.batch_size // self.ranks
        return [
            (mine[b * size : (b + 1) * size], seed_of(self.seed, epoch, b, self.rank))
            for b in range(first, len(mine) // size)
        ]
