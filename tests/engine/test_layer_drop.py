"""Layers that a draw of Python's generator drops: dropped alike in the replay, and drawn once."""

import random

from torch import nn

import halfway
from tests.helpers.replays import density, gradients


class LayerDrop(nn.Module):
    """Skips a layer by a draw of Python's generator."""

    def __init__(self):
        super().__init__()
        self.first, self.maybe, self.cut, self.head = (nn.Linear(5, 5) for _ in range(4))

    def forward(self, x):
        h = self.first(x).tanh()
        if random.random() < 0.5:
            h = self.maybe(h)
        return self.head(self.cut(h))


def test_layers_dropped_by_pythons_generator_are_dropped_alike_and_drawn_once(x):
    model = LayerDrop().train()
    blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=density(), reuse="replay")
    random.seed(0)
    for _ in range(8):
        gradients(model, blocker(x))
    drawn = random.getstate()
    assert blocker.stats.steps_replayed == 8
    random.seed(0)
    for _ in range(8):
        random.random()
    assert random.getstate() == drawn


def test_python_draws_between_the_blocker_and_the_model_are_not_lost(x):
    model = LayerDrop().train()
    blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=density(), reuse="replay")
    random.seed(0)
    retained = blocker(x)
    between = random.random()
    gradients(model, retained)
    after = random.random()
    random.seed(0)
    assert [random.random() for _ in range(3)][1:] == [between, after]
