"""PFB as the authors' later public code scores it."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import functional as PF
from ..state.estimator import DensityEstimator
from .density import Density

# Standard deviation of the noise, relative to the largest score of the batch.
_NOISE = 0.1


class DensityPublic(Density):
    """`Density` with another importance, for comparison.

    What: -score + noise, where the score is the mean over the centroids of log N(x - c_j) with sqrt(h_d) in place of
        the variance h_d and without kernel weights (`functional.mean_log_kernel`), and the noise is Gaussian, per
        sample, with a standard deviation of 0.1 max |score|.
    Source: the public code of Wu et al., which differs from their paper, "Partial Forward Blocking", ICCV 2025.
    Cost: that of `Density`.
    Caveats: the score is a square of the distance to the centroids' mean, so that it prunes the centre and retains the
        rim. Their code also raises the ratio from 0.2 p to p in the first half of the window; this is only the scoring.
        `noise` and `kernel_weights` of `Density` have no effect.

    Args:
        as `Density`.
    """

    name = "density_public"

    def importance(self, estimator: DensityEstimator, x_BD: Tensor, generator: torch.Generator) -> Tensor:
        x_BD = x_BD.to(estimator.centroids.dtype)
        score_B = PF.mean_log_kernel(x_BD, estimator.centroids, estimator.bandwidth)
        noise_B = torch.randn(len(score_B), generator=generator, device=score_B.device, dtype=score_B.dtype)
        return -score_B + _NOISE * score_B.abs().max() * noise_B
