"""Slow, obvious float64 versions of the paper's equations, to check the library against.

One loop per sum, one line per formula, Python floats throughout. Nothing is vectorised and nothing comes from
`halfway`, so an error in the library cannot hide here too. Inputs are anything NumPy can read (CPU tensors
included), results are NumPy arrays or plain numbers.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch


def _rows(matrix) -> list[list[float]]:
    return np.asarray(matrix, dtype=np.float64).tolist()


def _mean(values) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def _std(values: list[float]) -> float:
    """Sample standard deviation; 0 for a single value."""
    if len(values) == 1:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def _squared_distance(a: list[float], b: list[float]) -> float:
    return math.fsum((p - q) ** 2 for p, q in zip(a, b, strict=True))


def logsumexp(values: list[float]) -> float:
    """log sum_k exp(v_k)."""
    largest = max(values)
    if largest == -math.inf:
        return largest
    return largest + math.log(math.fsum(math.exp(v - largest) for v in values))


# --- representation -------------------------------------------------------------------------------


def pool_channels(channels: list[float], dim: int) -> list[float]:
    """Average pooling to `dim` values; bin i of n channels is [floor(i n / dim), ceil((i + 1) n / dim))."""
    n = len(channels)
    if n <= dim:
        return list(channels)
    return [_mean(channels[(i * n) // dim : -((-(i + 1) * n) // dim)]) for i in range(dim)]


def represent(features, dim: int, channel_dim: int) -> np.ndarray:
    """Mean over every axis but the batch and the channels, then `pool_channels`."""
    features = np.asarray(features, dtype=np.float64)
    axis = channel_dim if channel_dim >= 0 else channel_dim + features.ndim
    result = []
    for sample in features:
        by_channel: list[list[float]] = [[] for _ in range(features.shape[axis])]
        for position in itertools.product(*(range(size) for size in sample.shape)):
            by_channel[position[axis - 1]].append(float(sample[position]))
        result.append(pool_channels([_mean(values) for values in by_channel], dim))
    return np.array(result)


# --- density (Eq. 4-6 and 9) ----------------------------------------------------------------------


def bandwidth(centroids, rule: str) -> np.ndarray:
    """Eq. 6; sigma_d is at least 1e-3 of the mean sigma, 1e-6 of the centroids' root mean square, 1e-12."""
    rows = _rows(centroids)
    C, D = len(rows), len(rows[0])
    if rule == "identity":
        return np.array([1.0] * D)
    factor = {"silverman": (4 / ((D + 2) * C)) ** (1 / (D + 4)), "scott": C ** (-1 / (D + 4))}[rule]
    sigmas = [_std([row[d] for row in rows]) for d in range(D)]
    size = math.sqrt(_mean(value**2 for row in rows for value in row))
    floor = max(1e-3 * _mean(sigmas), 1e-6 * size, 1e-12)
    return np.array([factor * max(sigma, floor) for sigma in sigmas])


def log_density(x, centroids, counts=None, rule: str = "silverman") -> np.ndarray:
    """Eq. 4 with the kernel of Eq. 5; the weights of Eq. 9, or 1 without counts."""
    scale = bandwidth(centroids, rule).tolist()
    rows = _rows(centroids)
    C, D = len(rows), len(rows[0])
    if counts is None:
        weights = [1.0] * C
    else:
        counts = [int(n) for n in counts]
        weights = [n / sum(counts) for n in counts]
    log_norm = 0.5 * D * math.log(2 * math.pi) + math.fsum(math.log(s) for s in scale)
    result = []
    for point in _rows(x):
        terms = []
        for centroid, weight in zip(rows, weights, strict=True):
            distance = math.fsum(((p - c) / s) ** 2 for p, c, s in zip(point, centroid, scale, strict=True))
            log_weight = math.log(weight / C) if weight > 0 else -math.inf
            terms.append(log_weight - log_norm - 0.5 * distance)
        result.append(logsumexp(terms))
    return np.array(result)


# --- importance and selection (Eq. 1-3) -----------------------------------------------------------


def importance(log_f, alphas) -> np.ndarray:
    """log I_i = -log(f_i + alpha_i max f), for given alphas."""
    log_f = [float(v) for v in log_f]
    log_max = max(log_f)
    result = []
    for value, alpha in zip(log_f, alphas, strict=True):
        terms = [value] if alpha == 0 else [value, math.log(float(alpha)) + log_max]
        result.append(-logsumexp(terms))
    return np.array(result)


def retained_count(size: int, prune_ratio: float) -> int:
    """Everything but the round(p N) pruned samples; one sample always stays."""
    pruned = round(prune_ratio * size)
    return size - pruned if pruned < size else 1


# --- clusters and centroids (Eq. 7 and 8) ---------------------------------------------------------


def assign(x, centroids) -> np.ndarray:
    """Eq. 7: the nearest centroid; the first of several equally near ones."""
    rows = _rows(centroids)
    result = []
    for point in _rows(x):
        nearest = 0
        for j in range(1, len(rows)):
            if _squared_distance(point, rows[j]) < _squared_distance(point, rows[nearest]):
                nearest = j
        result.append(nearest)
    return np.array(result, dtype=np.int64)


def cluster_sums(x, centroids) -> tuple[np.ndarray, np.ndarray]:
    """The sum and the number of the samples assigned to each centroid."""
    C, D = np.shape(centroids)
    sums = [[0.0] * D for _ in range(C)]
    arrivals = [0] * C
    for point, j in zip(_rows(x), assign(x, centroids).tolist(), strict=True):
        arrivals[j] += 1
        for d in range(D):
            sums[j][d] += point[d]
    return np.array(sums), np.array(arrivals, dtype=np.int64)


def update_centroids(centroids, counts, sums, arrivals, beta: float, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """Eq. 8: "as_printed" divides by n + m, "convex" by the sum of the weights, beta n + (1 - beta) m."""
    new_centroids, new_counts = [], []
    for c, n, s, m in zip(_rows(centroids), counts, _rows(sums), arrivals, strict=True):
        n, m = int(n), int(m)
        total = {"as_printed": n + m, "convex": beta * n + (1 - beta) * m}[rule]
        if total == 0:  # Neither past nor arrivals.
            new_centroids.append(c)
        else:
            new_centroids.append([(beta * n * p + (1 - beta) * q) / total for p, q in zip(c, s, strict=True)])
        new_counts.append(n + m)
    return np.array(new_centroids), np.array(new_counts, dtype=np.int64)


# --- what a replay is documented to do with BatchNorm ---------------------------------------------------------------


class FullBatchNorm(torch.autograd.Function):
    """BatchNorm of S samples with given statistics (those of all N); its backward pass treats them as the S own ones:

    dx_i = w / std * (dy_i - mean_S(dy) - xhat_i * mean_S(dy * xhat))
    """

    @staticmethod
    def forward(ctx, x, mean, variance, weight, bias, eps):
        shape = (1, -1) + (1,) * (x.ndim - 2)
        std = (variance + eps).sqrt().view(shape)
        xhat = (x - mean.view(shape)) / std
        ctx.save_for_backward(xhat, std, weight)
        return xhat * weight.view(shape) + bias.view(shape)

    @staticmethod
    def backward(ctx, dy):
        xhat, std, weight = ctx.saved_tensors
        axes = tuple(d for d in range(dy.ndim) if d != 1)
        correction = dy.mean(axes, keepdim=True) + xhat * (dy * xhat).mean(axes, keepdim=True)
        dx = weight.view_as(std) / std * (dy - correction)
        return dx, None, None, (dy * xhat).sum(axes), dy.sum(axes), None
