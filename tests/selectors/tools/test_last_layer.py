"""The last linear layer of a model, and what enters it."""

from __future__ import annotations

import torch
from torch import nn

from halfway.selectors.tools.last_layer import channels_first, last_linear, width_of
from tests.helpers.classified import (
    CLASSES,
)


class WithHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3)
        self.classifier = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, CLASSES, 1))
        self.aux_classifier = nn.Sequential(nn.Conv2d(8, CLASSES, 1))
        self.AuxLogits = nn.Linear(8, CLASSES)


def test_the_last_linear_layer_is_found():
    model = WithHeads()
    assert last_linear(model) is model.classifier[3]
    assert width_of(model.classifier[3]) == CLASSES
    mlp = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, CLASSES), nn.LogSoftmax(1))
    assert last_linear(mlp) is mlp[2]
    assert width_of(mlp[2]) == CLASSES
    tokens = nn.Sequential(nn.Linear(3, 4), nn.Conv1d(4, CLASSES, 1))
    assert last_linear(tokens) is tokens[1]


def test_a_model_that_ends_in_something_else_has_none():
    assert last_linear(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, CLASSES, 3))) is None  # smp's U-Net, say
    assert last_linear(nn.Sequential(nn.Linear(3, 8), nn.Conv2d(8, 8, 1, groups=8))) is None
    assert last_linear(nn.ReLU()) is None


def test_features_of_a_linear_layer_are_last_and_of_a_convolution_first():
    linear, convolution = nn.Linear(3, 2), nn.Conv2d(3, 2, 1)
    assert channels_first(torch.zeros(4, 3), linear).shape == (4, 3)
    assert channels_first(torch.zeros(4, 7, 3), linear).shape == (4, 3, 7)
    assert channels_first(torch.zeros(4, 5, 7, 3), linear).shape == (4, 3, 5, 7)
    assert channels_first(torch.zeros(4, 3, 5, 7), convolution).shape == (4, 3, 5, 7)
    assert channels_first(torch.zeros(4, 7, 3), None).shape == (4, 3, 7)
