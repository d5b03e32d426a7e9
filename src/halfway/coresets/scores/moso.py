"""Moving one sample out: does the gradient of the others agree with its own?"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import Scored
from ..evidence import Evidence


class MoSo(Scored):
    """Retain the samples whose gradients agree with everyone else's.

    What: lr (g_mean - g_i / N) . g_i, over all parameters, with g_mean the mean gradient of the training set and lr the
        learning rate at a checkpoint; mean over 10 checkpoints of each of several trainings. The largest are retained.
    Source: Tan et al., "Data Pruning via Moving-one-Sample-out", NeurIPS 2023. Theirs is
        g_i . (N g_mean - g_i) / (N - 1) times a factor for all samples: the same ranking within a checkpoint.
    Cost: whole trainings of the network; for each checkpoint a forward and backward pass over all samples for g_mean,
        one `torch.func.jvp` (about two forward passes) for the dot products, and as much as GraNd for the norms of g_i
        unless `own_share=False` in `measure.checkpoint` leaves them out.
    Caveats: it prefers samples that everyone else pulls along, easy ones late in training, so it prunes wrong labels
        rather than retaining them. In eval mode, and with the plain cross-entropy. Forward-mode derivatives are not
        implemented for every operation of PyTorch. Checkpoints with and without norms cannot be mixed.
    """

    name = "moso"
    needs = "checkpoints"
    uses = ("checkpoints",)

    def score(self, evidence: Evidence, generator: torch.Generator | None = None) -> Tensor:
        evidence.require(self.uses, self.name)
        points = evidence.checkpoints
        with_norms = [point.square_norms_N is not None for point in points]
        if any(with_norms) != all(with_norms):
            raise ValueError(
                f"{sum(with_norms)} of {len(points)} checkpoints have the norms of the gradients; measure all of them "
                "with the same own_share"
            )
        total_N = torch.zeros(evidence.num_samples, dtype=torch.float64)
        for point in points:
            own_N = 0.0 if point.square_norms_N is None else point.square_norms_N.double() / evidence.num_samples
            total_N += point.lr * (point.alignments_N.double() - own_N)
        return total_N / len(points)
