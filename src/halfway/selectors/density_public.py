"""PFB as the authors' later public code scores it."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import functional
from ..state.estimator import DensityEstimator
from .density import Density

# Standard deviation of the noise, relative to the largest score of the batch.
_NOISE = 0.1


class DensityPublic(Density):
    """`Density` with the scoring of the authors' public code, and nothing else from that code, for comparison.

    What: -score + noise, where the score is the mean over the centroids of log N(x - c_j) with sqrt(h_d) in place of
        the variance h_d and without kernel weights (`functional.mean_log_kernel`), and the noise is Gaussian, per
        sample, with a standard deviation of 0.1 max |score|.
    Source: the public code of Wu et al., which differs from their paper, "Partial Forward Blocking", ICCV 2025.
    Cost: that of `Density`.
    Caveats: the score is quadratic in the distance to the centroids' mean, so it prunes the centre and retains the rim.
        `noise`, `noise_scale` and `kernel_weights` of `Density` have no effect. This is not a reproduction of their
        code, which differs in five more points. (1) Here centroids move by the convex Eq. 8 of `Density`; their code
        counts a centroid once even if several samples are assigned to it, and its centroids run away from the samples.
        (2) Here the bandwidth is the square root of Silverman's h; theirs comes from the square of Scott's factor
        (`bandwidth="scott"` is the factor itself). (3) Here channels are averaged over positions on whichever axis they
        are; their code pools Swin's (B, H, W, C) maps as if they were (B, C, H, W), which leaves a profile over rows.
        (4) Here centroids start and fill as in `Density`. (5) Here the blocker sets the ratio and the epochs; their
        code raises the ratio from 0.2 p to p until half of the epoch at which pruning ends, and still prunes in that
        last epoch.

    Args:
        as `Density`.
    """

    name = "density_public"

    def score(self, estimator: DensityEstimator, x_BD: Tensor) -> Tensor:
        x_BD = x_BD.to(estimator.centroids.dtype)
        return -functional.mean_log_kernel(x_BD, estimator.centroids, estimator.bandwidth)

    def with_noise(self, score_B: Tensor, generator: torch.Generator) -> Tensor:
        noise_B = torch.randn(len(score_B), generator=generator, device=score_B.device, dtype=score_B.dtype)
        return score_B + _NOISE * score_B.abs().max() * noise_B
