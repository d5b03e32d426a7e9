"""A selector by density that has learnt from some features."""

from __future__ import annotations

from torch import nn

from halfway.selectors import Candidates
from tests.helpers.draws import generator


def learnt(selector, features):
    selector.bind("cut", nn.Identity())
    selector.learn(Candidates(len(features), generator(), features), None)
    return selector
