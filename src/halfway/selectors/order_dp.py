"""OrderDP: a random pool, and the largest last known losses in it. Decided before the model runs, at no cost."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Candidates, Selection, Selector
from .tools.draw import without_ties
from .tools.last_losses import LastLosses, known_or_mean


class OrderDP(Selector):
    """Retains the samples of a random pool whose loss was largest when they were last trained on.

    What: round(pool x B) of the B samples are drawn at random, and of these the S with the largest last losses stay. A
        sample without a known loss counts as average; ties are broken at random. Every sample is left out with
        probability 1 - pool at least, so the hardest ones are not in every step; an easy one comes back only if few of
        the pool are harder. If the pool would be smaller than S, it has S samples, and the choice is random.
    Source: Jin et al., "OrderDP: A Theoretically Guaranteed Lossless Dynamic Data Pruning Framework", ICLR 2026. They
        draw the pool from the whole data set before each epoch; here it is drawn from each batch.
    Cost: 1 - p, nothing is run on pruned samples. 4 bytes per sample of the data set, and `blocker.observe(losses)`.
    Caveats: prefers outliers and wrong labels. A pruned sample keeps its old loss.

    Args:
        pool: the share of the batch that is drawn first: 1 is `LastLossHard`, 1 - p and below random.
        num_samples: size of the data set, see `SampleMemory`.
    """

    name = "order_dp"
    wants_ids = "required"
    wants_losses = "required"

    def __init__(self, pool: float = 0.8, num_samples: int | None = None) -> None:
        if not 0 < pool <= 1:
            raise ValueError(f"pool is a share of the batch and must be in (0, 1], got {pool}")
        self.pool = pool
        self._losses = self.remember("losses", LastLosses(num_samples))

    def select(self, candidates: Candidates, count: int) -> Selection:
        generator = candidates.generator
        losses_B, _, _ = known_or_mean(self._losses.of(candidates))
        losses_B = without_ties(losses_B, generator)
        order_B = torch.randperm(candidates.size, generator=generator, device=generator.device)
        pool_P = order_B[: max(count, round(self.pool * candidates.size))]
        hardest_S = losses_B[pool_P].topk(count, sorted=False).indices
        return Selection(pool_P[hardest_S].sort().values, losses_B)

    def observe(self, candidates: Candidates, retained: Tensor | None, losses: Tensor) -> None:
        self._losses.observe(candidates, retained, losses)
