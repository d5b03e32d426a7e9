"""Activation checkpointing before the cut: replayed, unless it draws."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfway
from tests.helpers.replays import density, gradients, relative_difference


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_under_activation_checkpointing_is_recomputed(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            x = x.clone().requires_grad_()
            inner = lambda x: F.dropout(self.a(x), 0.5)  # noqa: E731
            return self.c(self.b(checkpoint(inner, x, use_reentrant=use_reentrant)))

    model = Checkpointed().train()
    blocker = halfway.ForwardBlocker(model, "b", 0.5, selector=density())
    with pytest.warns(UserWarning, match="checkpoint"):
        retained = blocker(torch.randn(8, 5))
    state = torch.get_rng_state()
    found = gradients(model, retained)
    assert blocker.stats.steps_recomputed == 1
    torch.set_rng_state(state)
    assert relative_difference(found, gradients(model, retained)) < 1e-6


def test_checkpointed_convolutions_without_randomness_replay():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.c(self.b(checkpoint(lambda x: self.a(x).tanh(), x, use_reentrant=False)))

    model = Checkpointed().train()
    blocker = halfway.ForwardBlocker(model, "b", 0.5, selector=density(), reuse="replay")
    retained = blocker(torch.randn(8, 5))
    found = gradients(model, retained)
    blocker.remove()
    assert relative_difference(found, gradients(model, retained)) < 1e-6
