"""Gradients and curvature of the last linear layer, from logits and features alone.

For logits W phi + b the gradient of a sample's cross-entropy for (W, b) is the outer product of e = p - y and
phi~ = [phi, 1]. Dot products of such gradients factorise, and nothing of C (D + 1) numbers per sample is ever stored.

Shape suffixes: N samples, n of them, C classes, D features, E = D + 1, P projections.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .evidence import Evidence
from .outputs import errors

_BLOCK = 16_384  # samples that are converted to float32 or float64 at once


def with_one(features_nD: Tensor) -> Tensor:
    """(n, E) [phi, 1], in at least float32."""
    features_nD = features_nD.to(torch.promote_types(features_nD.dtype, torch.float32))
    return torch.cat([features_nD, features_nD.new_ones(len(features_nD), 1)], 1)


def factors(evidence: Evidence, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(n, C) p - y and (n, E) [phi, 1] of some samples."""
    assert evidence.logits_NC is not None
    assert evidence.features_ND is not None
    return errors(evidence.logits_NC[ids], evidence.labels_N[ids]), with_one(evidence.features_ND[ids])


class Curvature:
    """The Kronecker-factored Gauss-Newton matrix of the last layer, H = (B + b I) x (A + a I).

    B (C, C) is the mean of diag(p) - p p^T, A (E, E) that of phi~ phi~^T. Their product is the mean of the products if
    p and phi are uncorrelated over samples, for example if one of them is the same for all; otherwise it approximates
    the Gauss-Newton matrix. a and b are `damping` times the mean eigenvalue of A and of B.
    """

    def __init__(self, evidence: Evidence, damping: float) -> None:
        assert evidence.logits_NC is not None
        assert evidence.features_ND is not None
        classes, width = evidence.num_classes, evidence.features_ND.shape[1] + 1
        B_CC = torch.zeros(classes, classes, dtype=torch.float64)
        A_EE = torch.zeros(width, width, dtype=torch.float64)
        for ids in blocks(evidence.num_samples):
            p_nC = evidence.logits_NC[ids].to(torch.float64).softmax(1)
            B_CC += torch.diag(p_nC.sum(0)) - p_nC.T @ p_nC
            features_nE = with_one(evidence.features_ND[ids])
            A_EE += (features_nE.T @ features_nE).to(torch.float64)
        self._B_CC = _inverse(B_CC / evidence.num_samples, damping)
        self._A_EE = _inverse(A_EE / evidence.num_samples, damping)

    def solve(self, errors_nC: Tensor, features_nE: Tensor) -> tuple[Tensor, Tensor]:
        """The factors (n, C) and (n, E) of H^-1 g, from those of g."""
        return errors_nC @ self._B_CC.to(errors_nC.dtype), features_nE @ self._A_EE.to(features_nE.dtype)


def _inverse(matrix: Tensor, damping: float) -> Tensor:
    size = len(matrix)
    # A matrix of zeros (a proxy that is certain of everything) gets the identity.
    scale = matrix.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    damped = matrix + damping * scale * torch.eye(size, dtype=matrix.dtype)
    return torch.cholesky_inverse(torch.linalg.cholesky(damped))


def blocks(count: int) -> tuple[Tensor, ...]:
    """All ids up to `count`, in blocks."""
    return torch.arange(count, device="cpu").split(_BLOCK)
