"""Eq. 1-9 of the paper as pure functions on tensors.

Shape suffixes: B batch, S retained samples, C centroids, D dimensions of a representation.
Equation numbers are those of Wu et al., "Partial Forward Blocking", ICCV 2025.

Two things run through the whole file. Densities are only ever handled as logarithms: at D = 128 the density
itself leaves the range of float32 in both directions. And nothing here reads a value back to the host or
produces a shape that depends on data, so a training step on an accelerator never waits for these functions.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

BandwidthRule = Literal["silverman", "scott", "identity"]
UpdateRule = Literal["convex", "as_printed"]
NoiseScale = Literal["paper", "spread"]

# A dimension in which all centroids agree has no spread to scale distances by. It gets a floor relative to the
# other dimensions and to the centroids' own size; the absolute one only matters when every centroid is zero.
_SPREAD_FLOOR = 1e-3
_SIZE_FLOOR = 1e-6
_ABSOLUTE_FLOOR = 1e-12
# The interquartile range of a normal distribution, in standard deviations.
_QUARTILES = 1.3489795
# Far beyond any distance that could still be ranked, and small enough that sums of it stay finite in float32.
_FARTHEST = 1e30


def represent(features: Tensor, dim: int = 128, channel_dim: int = 1) -> Tensor:
    """Pool feature maps to one short vector per sample ("balanced kernel density estimation", first sentence).

    All axes but the batch and the channels are averaged, then neighbouring channels are averaged down to `dim`.
    Channels are never *up*-sampled: fewer than `dim` of them stay as they are.

    Args:
        features: (B, D_org, H, W), (B, H, W, D_org), (B, L, D_org), (B, D_org), ...: the batch comes first.
        dim: D, the most dimensions a representation may have.
        channel_dim: which axis of `features` holds the channels.

    Returns:
        (B, min(dim, D_org)), float32 or better.
    """
    if features.ndim < 2:
        raise ValueError(f"features need a batch axis and a channel axis, got shape {tuple(features.shape)}")
    axis = channel_dim + features.ndim if channel_dim < 0 else channel_dim
    if not 1 <= axis < features.ndim:
        raise ValueError(
            f"channel_dim={channel_dim} is not an axis of features with shape {tuple(features.shape)}, or is the batch"
        )
    dtype = torch.promote_types(features.dtype, torch.float32)
    pooled_axes = [d for d in range(1, features.ndim) if d != axis]
    x_BD = features.mean(pooled_axes, dtype=dtype) if pooled_axes else features.to(dtype)
    if x_BD.shape[1] > dim:
        x_BD = F.adaptive_avg_pool1d(x_BD.unsqueeze(1), dim).squeeze(1)
    return x_BD


def bandwidth(centroids: Tensor, rule: BandwidthRule = "silverman") -> Tensor:
    """Standard deviations sqrt(h_d) of the kernel along each dimension (Eq. 6).

    Silverman: sqrt(h_d) = (4 / ((D + 2) C))^(1 / (D + 4)) * sigma_d, Scott: C^(-1 / (D + 4)) * sigma_d, where
    sigma_d is the standard deviation of the centroids along dimension d; identity: 1. sigma_d has a floor, so that
    a constant feature cannot divide by zero.

    Args:
        centroids: (C, D).
        rule: "silverman" (the paper), "scott" or "identity" (its ablations).

    Returns:
        (D,), positive.
    """
    C, D = centroids.shape
    if rule == "identity":
        return torch.ones_like(centroids[0])
    if rule == "silverman":
        factor = (4 / ((D + 2) * C)) ** (1 / (D + 4))
    elif rule == "scott":
        factor = C ** (-1 / (D + 4))
    else:
        raise ValueError(f"unknown bandwidth {rule!r}; choose 'silverman', 'scott' or 'identity'")
    sigma_D = centroids.std(0, correction=1 if C > 1 else 0)
    floor = torch.maximum(_SPREAD_FLOOR * sigma_D.mean(), _SIZE_FLOOR * centroids.square().mean().sqrt())
    return factor * torch.maximum(sigma_D, floor.clamp_min(_ABSOLUTE_FLOOR))


def log_density(
    x: Tensor,
    centroids: Tensor,
    counts: Tensor | None = None,
    bandwidth_rule: BandwidthRule = "silverman",
) -> Tensor:
    """Log of the balanced kernel density estimate (Eq. 4, 5 and 9).

    log f(x) = logsumexp_j( log(w_j / C) + log N(x; c_j, H) ) with w_j = n_j / sum_k n_k.

    Args:
        x: (B, D) representations.
        centroids: (C, D).
        counts: (C,) samples n_j each centroid stands for; None sets every w_j to 1 (the paper's "w/o weight").
        bandwidth_rule: see `bandwidth`.

    Returns:
        (B,), finite for representations up to 1e18 in size.
    """
    C, D = centroids.shape
    scale_D = bandwidth(centroids, bandwidth_rule)
    # Centred, and without the matmul trick: both would lose the small differences between large features.
    middle_D = centroids.mean(0)
    distance_BC = torch.cdist(
        (x - middle_D) / scale_D,
        (centroids - middle_D) / scale_D,
        compute_mode="donot_use_mm_for_euclid_dist",
    ).square()
    log_kernel_BC = -0.5 * distance_BC.clamp_max(_FARTHEST) - scale_D.log().sum() - 0.5 * D * math.log(2 * math.pi)
    log_kernel_BC = log_kernel_BC - math.log(C)
    if counts is not None:
        log_kernel_BC = log_kernel_BC + (counts.to(x.dtype) / counts.sum().to(x.dtype)).log()
    return log_kernel_BC.logsumexp(1)


def mean_log_kernel(x: Tensor, centroids: Tensor, bandwidth_rule: BandwidthRule = "silverman") -> Tensor:
    """Mean over the centroids of log N(x; c_j, diag(s)), where s_d is what `bandwidth` gives: the score of the authors'
    later public code, which takes Eq. 6's sqrt(h_d) as the variance, and no kernel weights.

    The log of a product of kernels instead of their sum: far from a single centroid it keeps falling with the square of
    the distance to the centroids' mean, and does not see where between them a sample lies.

    Args:
        x: (B, D) representations.
        centroids: (C, D).
        bandwidth_rule: see `bandwidth`.

    Returns:
        (B,).
    """
    variance_D = bandwidth(centroids, bandwidth_rule)
    # The mean over j of (x - c_j)^2, without a (B, C, D) tensor: about the mean of the centroids, plus their spread.
    middle_D = centroids.mean(0)
    spread_D = (centroids - middle_D).square().mean(0)
    square_BD = (((x - middle_D).square() + spread_D) / variance_D).clamp_max(_FARTHEST)
    D = centroids.shape[1]
    return -0.5 * (square_BD.sum(1) + variance_D.log().sum() + D * math.log(2 * math.pi))


def importance(
    log_f: Tensor,
    noise: float = 0.01,
    generator: torch.Generator | None = None,
    noise_scale: NoiseScale = "paper",
) -> Tensor:
    """Log of the probability density importance (Eq. 2 and 3).

    "paper": log I = -log( f + alpha * max f ) with alpha ~ U(0, noise), drawn **per sample**: one alpha for the whole
    batch would add the same number to every density and could not reorder anything. Samples of a density below about
    noise * max f are ranked by alpha alone, and how many these are depends on how far the log densities spread, which
    grows with D.

    "spread": -log f + noise * s * z with z ~ N(0, 1) per sample and s the interquartile range of the log densities of
    the batch / 1.349, which is their standard deviation if they are normal. Shifting or stretching all log densities
    changes no choice, so that the same noise has the same effect at any D.

    Args:
        log_f: (B,) log densities.
        noise: the paper's b, or the standard deviation of the noise relative to s; 0 ranks by density alone.
        generator: where the randomness comes from (on the device of `log_f`).
        noise_scale: "paper" (default) or "spread".

    Returns:
        (B,), larger is more important.
    """
    if noise_scale == "spread":
        ordered, quarter = log_f.sort().values, (len(log_f) - 1) // 4
        spread = (ordered[-1 - quarter] - ordered[quarter]) / _QUARTILES
        z_B = torch.randn(log_f.shape, generator=generator, device=log_f.device, dtype=log_f.dtype)
        return -log_f + noise * spread * z_B
    if noise_scale != "paper":
        raise ValueError(f"unknown noise scale {noise_scale!r}; choose 'paper' or 'spread'")
    alpha_B = noise * torch.rand(log_f.shape, generator=generator, device=log_f.device, dtype=log_f.dtype)
    return -torch.logaddexp(log_f, alpha_B.log() + log_f.max())


def all_finite(values: Tensor) -> Tensor:
    """() bool, on the device: whether no value is NaN or infinite. Three launches; `isfinite().all()` takes five."""
    return (values * 0).sum() == 0


def retained_count(size: int, prune_ratio: float) -> int:
    """S = N - round(p N), at least 1 (Eq. 1): constant for a given batch size, so that shapes never change."""
    return max(1, size - round(prune_ratio * size))


def retain(importance: Tensor, count: int) -> Tensor:
    """Indices of the `count` most important samples, sorted (Eq. 1).

    Exactly `count` of them, ties or not; the paper's threshold (`I < percentile`) keeps too many when values tie.

    Args:
        importance: (B,).
        count: S, from `retained_count`.

    Returns:
        (S,) int64, ascending.
    """
    if not 1 <= count <= len(importance):
        raise ValueError(f"cannot retain {count} of {len(importance)} samples")
    return importance.topk(count, sorted=False).indices.sort().values


def assign(x: Tensor, centroids: Tensor) -> Tensor:
    """Index of the nearest centroid of each representation, Euclidean (Eq. 7).

    Args:
        x: (S, D).
        centroids: (C, D).

    Returns:
        (S,) int64.
    """
    return torch.cdist(x, centroids, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)


def highest(scores: Tensor, ids: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Of some samples those with the largest scores; equal ones in random order.

    Args:
        scores: (N,) of all samples, on the CPU, without NaN.
        ids: (M,) int64, the samples to choose from.
        count: how many.
        generator: on the CPU.

    Returns:
        (count,) int64, the best first.
    """
    shuffled_M = ids[torch.randperm(len(ids), generator=generator, device="cpu")]
    return shuffled_M[scores[shuffled_M].argsort(descending=True, stable=True)[:count]]


def cluster_sums(x: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """What each cluster receives from one batch (the sums inside Eq. 8): plain sums, so they add up over ranks.

    Args:
        x: (S, D) representations of the retained samples.
        centroids: (C, D).

    Returns:
        sums (C, D) of the representations assigned to each centroid, arrivals (C,) int64, their number.
    """
    member_SC = assign(x, centroids).unsqueeze(1) == torch.arange(len(centroids), device=x.device)
    # A product instead of index_add: the latter adds in a random order on CUDA. In full precision, also when the
    # model runs under autocast.
    with torch.autocast(x.device.type, enabled=False):
        return member_SC.to(x.dtype).T @ x, member_SC.sum(0)


def update_centroids(
    centroids: Tensor,
    counts: Tensor,
    sums: Tensor,
    arrivals: Tensor,
    beta: float = 0.01,
    rule: UpdateRule = "convex",
) -> tuple[Tensor, Tensor]:
    """Move the centroids towards the samples that arrived (Eq. 8).

    c' = (beta n c + (1 - beta) sum x) / Z, n' = n + m, where m samples arrive at a centroid that stands for n.

    The printed Z is n + m. That is not a convex combination: the weights only add up to beta n + (1 - beta) m, so
    every update shrinks the centroids towards the origin until all samples fall into one cluster. "convex", the
    default, divides by beta n + (1 - beta) m; "as_printed" stays available for study.

    Args:
        centroids: (C, D).
        counts: (C,) int64, n.
        sums: (C, D) and
        arrivals: (C,) int64, m, from `cluster_sums`.
        beta: weight of the past.
        rule: "convex" or "as_printed".

    Returns:
        new centroids (C, D) and counts (C,).
    """
    n_C1 = counts.to(centroids.dtype).unsqueeze(1)
    m_C1 = arrivals.to(centroids.dtype).unsqueeze(1)
    new_counts = counts + arrivals
    if rule == "as_printed":
        total_C1 = new_counts.to(centroids.dtype).unsqueeze(1).clamp_min(1)
        return (beta * n_C1 * centroids + (1 - beta) * sums) / total_C1, new_counts
    if rule != "convex":
        raise ValueError(f"unknown update rule {rule!r}; choose 'convex' or 'as_printed'")
    # As an increment: exactly zero where nothing arrives, and accurate however large n has become.
    weight_C1 = (beta * n_C1 + (1 - beta) * m_C1).clamp_min(torch.finfo(centroids.dtype).tiny)
    return centroids + (1 - beta) * (sums - m_C1 * centroids) / weight_C1, new_counts
