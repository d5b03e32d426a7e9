"""InfoBatch: prunes some of the samples with a low loss at random, and gives the rest of these a larger weight."""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..state.sample_memory import SampleMemory
from .base import Common, Decision, EpochSampler

if TYPE_CHECKING:
    from typing_extensions import Unpack


class InfoBatch(EpochSampler):
    """Soft pruning of well-learned samples without bias.

    What: samples whose last known loss lies below a threshold are *candidates*. Each candidate is pruned with
    probability r; a retained one gets the weight 1 / (1 - r), all others 1. So the weighted sum of gradients over an
    epoch is that of the whole data set, on average: E[sum over retained of w_i g_i] = sum over all of g_i.

    Threshold, and how it turns prune_ratio p into the effective ratio:
        "mean" (the authors'): below the mean of the known losses, r = p. The effective ratio is p times the share of
            candidates, which depends on the losses; the PFB paper assumes p / 2.
        a number q in (0, 1]: the ceil(q K) lowest of the K known losses, r = p; of equal losses the lower id comes
            first. The effective ratio is about q p. 0.95 is what the PFB paper marks with a dagger, after DivBS.
        "match": the effective ratio is p. With a share q of candidates and pruning probability r this needs q r = p;
            both are set to sqrt(p): of the ceil(sqrt(p) K) lowest losses exactly round(p K) are pruned, and r is their
            share. Below p = 0.5 that is close to the authors' r = 0.5. Above, some samples are still safe, where a
            fixed r = 0.5 would make every sample a candidate: random pruning with one weight for all.

    Source: Qin et al., "InfoBatch: Lossless Training Speed Up by Unbiased Dynamic Data Pruning", ICLR 2024.
    Hyper-parameters: prune_ratio (authors: 0.5), threshold "mean", and a schedule that leaves the last eighth of the
    epochs alone (authors: delta = 0.875), `Schedule(0, int(0.875 * epochs))`.
    Cost: 4 bytes per sample, a scatter of B numbers per step (and one small sum over ranks), a sort of N per epoch.

    Caveats:
        - Multiply by the weights (`WithWeights` or `weights(ids)`); without them it is biased to hard samples.
        - The mean over a batch is then 1 / (1 - effective ratio) times that of full training: fewer but larger steps.
          The authors leave it so, and so do we.
        - A high r gives large weights (r = 0.7: 3.3), which the PFB paper suspects of doing harm.
        - Losses are as old as the sample's last visit. A sample without one is never a candidate, so the first epoch
          prunes nothing.
        - The authors' package always retains at least a tenth of the candidates, so that no weight exceeds 10; here r
          has no such bound, and at r = 0.99 a weight is 100.
        - The authors' code prunes an exact share of the candidates; "mean" and q toss a coin for each.
    """

    name = "infobatch"
    learns = True
    reweights = True
    memory: SampleMemory

    def __init__(
        self,
        data: int | Sized,
        prune_ratio: float,
        *,
        threshold: float | Literal["mean", "match"] = "mean",
        **common: Unpack[Common],
    ) -> None:
        if threshold not in ("mean", "match") and not (isinstance(threshold, (int, float)) and 0 < threshold <= 1):
            raise ValueError(
                f"threshold must be 'mean', 'match' or a quantile of the losses in (0, 1], got {threshold!r}"
            )
        self.threshold = threshold
        super().__init__(data, prune_ratio, **common)
        self.memory = SampleMemory(1, self.num_samples)

    def learn(self, ids: Tensor, losses: Tensor) -> None:
        self.memory.write(ids, losses, self.ranks)

    def decide(self, epoch: int, generator: torch.Generator) -> Decision:
        losses_N = self.memory.values.squeeze(1).cpu()
        candidates = self._candidates(losses_N)
        if self.threshold == "match":
            known = int(losses_N.isfinite().sum())
            # With a handful of samples all candidates could be pruned, and no weight makes up for that.
            count = max(0, min(round(self.prune_ratio * known), len(candidates) - 1))
            rate = count / max(1, len(candidates))
            pruned = candidates[torch.randperm(len(candidates), generator=generator, device="cpu")[:count]]
        else:
            rate = self.prune_ratio
            # One random number for every sample, so that the draws at a seed do not depend on the losses.
            chance_N = torch.rand(self.num_samples, generator=generator, device="cpu", dtype=torch.float32)
            pruned = candidates[chance_N[candidates] < rate]
        weights_N = torch.ones(self.num_samples, device="cpu", dtype=torch.float32)
        weights_N[candidates] = 1 / (1 - rate)
        retained_N = torch.ones(self.num_samples, dtype=torch.bool, device="cpu")
        retained_N[pruned] = False
        return Decision(retained_N.nonzero().squeeze(1), weights_N[retained_N])

    def _candidates(self, losses_N: Tensor) -> Tensor:
        """The ids of the samples that may be pruned, in no particular order."""
        known = losses_N.isfinite().nonzero().squeeze(1)
        losses = losses_N[known]
        if self.threshold == "mean":
            # float64: the mean of equal losses must not come out above them.
            return known[losses.double() < losses.double().mean()]
        q = math.sqrt(self.prune_ratio) if isinstance(self.threshold, str) else self.threshold
        # 0.07 * 100 is slightly more than 7 in floating point, and must not be rounded up to 8.
        count = min(len(known), math.ceil(q * len(known) - 1e-9))
        return known[losses.argsort(stable=True)[:count]]
