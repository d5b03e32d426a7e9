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
    """`Density` with the scoring of the authors' public code, and nothing else of that code, for comparison.

    What: -score + noise, where the score is the mean over the centroids of log N(x - c_j) with sqrt(h_d) in place of
        the variance h_d and without kernel weights (`functional.mean_log_kernel`), and the noise is Gaussian, per
        sample, with a standard deviation of 0.1 max |score|.
    Source: the public code of Wu et al., which differs from their paper, "Partial Forward Blocking", ICCV 2025.
    Cost: that of `Density`.
    Caveats: the score is a square of the distance to the centroids' mean, so that it prunes the centre and retains the
        rim. `noise`, `noise_scale` and `kernel_weights` of `Density` have no effect. Not theirs, and so not a
        reproduction of their code: (1) the centroids move by the convex Eq. 8 of `Density`; theirs counts a centroid
        that several samples fall on once, and its centroids run away from the samples. (2) The bandwidth is the
        square root of Silverman's h, where theirs comes from the square of Scott's factor; `bandwidth="scott"` is
        Scott's factor itself. (3) Channels are averaged over positions wherever they are; theirs pools (B, H, W, C)
        maps, those of Swin, as if they were (B, C, H, W), and is left with a profile over rows. (4) Centroids start
        and fill as in `Density`. (5) The ratio and the epochs are those of the blocker; theirs raises the ratio from
        0.2 p to p until half of the epoch at which pruning ends, and prunes in that last epoch, too.

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
