"""Spatially balanced sampling, as pure functions: near neighbours compete, and every unit has its prescribed chance.

The local pivotal method (Grafström, Lundström & Schelin, "Spatially Balanced Sampling through the Pivotal Method",
Biometrics 2012; the variant in which two units meet only if each is the other's nearest), here in rounds in which all
such pairs meet at once. The total chance of a pair stays within the pair: if that of one unit rises, that of its
neighbour falls. So two near-twins are rarely both drawn, and every region of the batch is represented by its share.
Every duel is a fair bet, so no unit's expected chance changes, whatever the distances are.

Shape suffixes: B units, S drawn, D coordinates, R rounds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# A dimension in which the samples differ by less than this, relative to their mean, counts as constant.
_CONSTANT = 1e-6
# Ties are broken at random by this much of the largest distance: less than float32 features can resolve.
_JITTER = 1e-9
# Upper bound of the random numbers that decide duels. Modulo n they are uniform to within n / 2^62.
_DICE = 2**62
# The mass of a unit that is certain, where probabilities differ. They are rounded to multiples of 1 / _WHOLE.
_WHOLE = 2**30
# A probability this close to 1 counts as 1: the rounding of a sum could otherwise give the unit more than the whole.
_CERTAIN = 1e-9


def pivotal(
    distances_BB: Tensor, count: int, generator: torch.Generator, probabilities_B: Tensor | None = None
) -> Tensor:
    """(S,) sorted rows: exactly `count`, near ones rarely together, each unit with probability `count` / B or its own.

    Chances are whole numbers out of W: every unit starts with a mass of S out of W = B, or, where probabilities are
    given, with that share of W = 2^30, and is decided when it has 0 or W. In a round all pairs of undecided units that
    are each other's nearest meet. With masses a and b,

        a + b < W:   one takes all, the other is out; the first wins with probability a / (a + b),
        a + b >= W:  one is drawn (W), the other keeps a + b - W; the first wins with (W - b) / (2 W - a - b),

    so the expected mass of every unit stays the same, and their sum is always S W. Each duel decides one unit or both.
    The number of rounds is fixed, so that nothing waits for the device to find out which units are left. The masses of
    those, few if any, add up to a multiple of W; they are drawn by systematic sampling (Madow 1949), in the order of
    their distance from one of them.

    Args:
        distances_BB: (B, B), symmetric, finite, not negative; only their order matters. Ties are broken at random.
        count: S.
        generator: on the device of the distances.
        probabilities_B: (B,) in [0, 1], which add up to `count`; None: all the same.
    """
    B, device = len(distances_BB), distances_BB.device
    if not 1 <= count <= B:
        raise ValueError(f"cannot retain {count} of {B} samples")
    far_BB = _without_ties(distances_BB, generator)
    dice_RB = torch.randint(_DICE, (rounds(B), B), generator=generator, device=device)
    if probabilities_B is None:
        whole, mass_B = B, torch.full((B,), count, device=device)
    else:
        whole, mass_B = _WHOLE, _masses(probabilities_B, count)
    for dice_B in dice_RB:
        mass_B = _round(far_BB, mass_B, dice_B, whole)
    one = (mass_B % whole != 0).to(torch.int8).argmax().reshape(1)
    order_B = far_BB.index_select(0, one).squeeze(0).index_fill(0, one, -1.0).argsort()
    start = torch.randint(whole, (), generator=generator, device=device)
    drawn_B = _systematic(mass_B[order_B], start, whole)
    return order_B[drawn_B.topk(count, sorted=False).indices].sort().values


def rounds(size: int) -> int:
    """The number of rounds for `size` units. In the plane half as many would do; among features, where a few units are
    the nearest of all others, fewer pairs meet in a round."""
    return 3 * math.ceil(math.log2(size)) + 4 if size > 1 else 0


def _without_ties(distances_BB: Tensor, generator: torch.Generator) -> Tensor:
    """(B, B) float64, symmetric, infinite on the diagonal, with equal distances made slightly different: otherwise all
    units equally far from each other would have the same nearest unit, and only one pair would meet per round."""
    d_BB = distances_BB.to(torch.float64)
    place_B = torch.rand(len(d_BB), generator=generator, device=d_BB.device, dtype=torch.float64)
    largest = d_BB.max()
    jitter = _JITTER * torch.where(largest > 0, largest, 1.0)
    d_BB = torch.minimum(d_BB, d_BB.T) + jitter * (place_B.unsqueeze(0) - place_B.unsqueeze(1)).abs()
    return d_BB.fill_diagonal_(math.inf)


def _masses(probabilities_B: Tensor, count: int) -> Tensor:
    """(B,) int64 from 0 to W that add up to exactly `count` W: probabilities times W, up or down to a whole number."""
    p_B = probabilities_B.to(torch.float64)
    certain_B = p_B >= 1 - _CERTAIN
    # The others lie on a line, and their ends are rounded: so no error adds up, and the last end is where it should be.
    ends_B = torch.where(certain_B, 0.0, p_B).cumsum(0)
    left = count - certain_B.sum()
    ends_B = (ends_B * (left / ends_B[-1].clamp_min(torch.finfo(torch.float64).tiny)) * _WHOLE).round().to(torch.int64)
    return torch.where(certain_B, _WHOLE, ends_B.diff(prepend=ends_B.new_zeros(1)))


def _round(far_BB: Tensor, mass_B: Tensor, dice_B: Tensor, whole: int) -> Tensor:
    """(B,) masses, out of `whole`, after all undecided units that are each other's nearest have met."""
    B = len(mass_B)
    unit_B = torch.arange(B, device=mass_B.device)
    decided_B = mass_B % whole == 0
    nearest_B = (far_BB + far_BB.new_zeros(B).masked_fill(decided_B, math.inf)).min(1).indices
    # There is never exactly one undecided unit, so the nearest is never a decided one. If none is left, unit 0 meets
    # itself, and nothing changes.
    meets_B = nearest_B[nearest_B] == unit_B
    other_B = mass_B[nearest_B]
    sum_B = mass_B + other_B
    small_B = sum_B < whole
    # The number of equal chances, and how many of them are this unit's; the others are its opponent's.
    chances_B = torch.where(small_B, sum_B, 2 * whole - sum_B).clamp_min(1)
    mine_B = torch.where(small_B, mass_B, whole - other_B)
    # Both units use the same random number: the lower unit's chances come first, the other's last.
    number_B = dice_B[torch.minimum(unit_B, nearest_B)] % chances_B
    wins_B = torch.where(unit_B < nearest_B, number_B < mine_B, number_B >= chances_B - mine_B)
    after_B = torch.where(wins_B, sum_B.clamp_max(whole), (sum_B - whole).clamp_min(0))
    return torch.where(meets_B, after_B, mass_B)


def _systematic(mass_B: Tensor, start: Tensor, whole: int) -> Tensor:
    """(B,) 1 for the units drawn, 0 for the others. Units lie on a line, each as long as its mass, and those on which
    one of the points `start`, `start + whole`, ... falls are drawn. Decided units need no care: a stretch of length
    `whole` holds exactly one point."""
    points_B = (mass_B.cumsum(0) - start + whole - 1).div(whole, rounding_mode="floor")
    return points_B.diff(prepend=points_B.new_zeros(1))


def standardised(x_BD: Tensor, known_B: Tensor) -> Tensor:
    """(B, D) float64: mean 0 and standard deviation 1 along each dimension, over the known rows.

    Unknown rows, which may hold anything, become 0, the average; so does a dimension in which all known rows agree.
    """
    known_B1 = known_B.unsqueeze(1)
    x_BD = torch.where(known_B1, x_BD, 0.0).to(torch.float64)
    number = known_B.sum().clamp_min(1)
    mean_D = x_BD.sum(0) / number
    x_BD = torch.where(known_B1, x_BD - mean_D, 0.0)
    sd_D = (x_BD.square().sum(0) / number).sqrt()
    constant_D = sd_D <= _CONSTANT * mean_D.abs()
    return torch.where(constant_D, 0.0, x_BD / torch.where(constant_D, 1.0, sd_D))


def distances(x_BD: Tensor, classes_B: Tensor | None = None) -> Tensor:
    """(B, B) float64, Euclidean. Samples of different classes, if given, are farther apart than any of the same class.

    By a matrix product, which loses half of the digits; hence float64, since near-twins are what matters here.
    """
    x_BD = x_BD.to(torch.float64)
    norm_B = x_BD.square().sum(1)
    d_BB = (norm_B.unsqueeze(0) + norm_B.unsqueeze(1) - 2 * x_BD @ x_BD.T).clamp_min(0).sqrt()
    if classes_B is None:
        return d_BB
    return d_BB + (classes_B.unsqueeze(0) != classes_B.unsqueeze(1)) * (d_BB.max() + 1)
