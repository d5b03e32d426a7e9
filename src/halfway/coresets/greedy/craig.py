"""Samples whose weighted gradients stand for those of all.

Shape suffixes: n samples of a class (or a part of it).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..base import Greedy, Picked
from ..budgets import Group, shares
from ..evidence import Evidence
from ..last_layer import factors
from .facility_location import cluster_sizes, lazy_greedy


class Craig(Greedy):
    """Choose the medoids of the gradients, and weigh each by the size of its cluster.

    What: per class, with g = (p - y) x [phi, 1], the gradient for the last linear layer, facility location with the
        similarity max d - d_ij, d_ij = norm(g_i - g_j), by lazy greedy. The weight of a chosen sample is the number of
        samples of its class that are nearest to it, itself included: the weights of a class add up to its size.
    Source: Mirzasoleiman, Bilmes & Leskovec, "Coresets for Data-efficient Training of Machine Learning Models", ICML
        2020. They choose again in the course of training; here once, as in the tables that compare coresets.
    Cost: a whole training of the network, a forward pass over all samples; per class a matrix of n^2 distances, from
        two Gram matrices.
    Caveats: train with the weights (divided by their mean), or it is another method; a table should have a row
        without. Public code has weights that are one too large. A class with more than `block` samples is divided at
        random into equal parts that choose separately, so that memory stays below about 3 block^2 numbers. The last
        layer's bias counts as one more feature, and logits are taken as that layer gives them: for a classifier
        without bias, or with scaled logits (`speedrun-cifar10`), it is an approximation.

    Args:
        block: the most samples that are compared with each other.
    """

    name = "craig"
    needs = "long run"
    uses = ("features_ND", "logits_NC")

    def __init__(self, block: int = 8192) -> None:
        if block < 1:
            raise ValueError(f"block must be at least 1, got {block}")
        self.block = block

    def pick(self, evidence: Evidence, parts: list[Group], generator: torch.Generator) -> Picked:
        ids, weights = [], []
        for group in parts:
            # Of equal samples the first is taken, so they come in random order.
            shuffled = group.ids[torch.randperm(len(group.ids), generator=generator)]
            pieces = shuffled.chunk(min(math.ceil(len(shuffled) / self.block), group.budget))
            counts = shares([group.budget * len(piece) / len(shuffled) for piece in pieces], group.budget)
            for piece, count in zip(pieces, counts, strict=True):
                similarity_nn = similarities(*factors(evidence, piece))
                chosen = lazy_greedy(similarity_nn, count)
                ids.append(piece[chosen])
                weights.append(cluster_sizes(similarity_nn, chosen))
        return Picked(torch.cat(ids), torch.cat(weights).to(torch.float32))


def similarities(errors_nC: Tensor, features_nE: Tensor) -> Tensor:
    """(n, n) max d - d_ij, with d the distances between the outer products of the rows."""
    gram_nn = (errors_nC @ errors_nC.T).mul_(features_nE @ features_nE.T)
    squares_n = gram_nn.diagonal().clone()
    d_nn = gram_nn.mul_(-2).add_(squares_n.unsqueeze(0)).add_(squares_n.unsqueeze(1)).clamp_min_(0).sqrt_()
    d_nn.fill_diagonal_(0)
    return d_nn.neg_().sub_(d_nn.min())
