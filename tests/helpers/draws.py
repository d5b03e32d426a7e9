"""Generators, and numbers that are drawn with them."""

import math

import torch


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def within(frequency, probability, draws, sigmas=5.0):
    """Whether a frequency is within so many standard errors of a probability."""
    return abs(frequency - probability) <= sigmas * math.sqrt(probability * (1 - probability) / draws) + 1e-12


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed))
