"""Loss by rank: drawn with the probabilities it states."""

from __future__ import annotations

import math

import torch

from halfway.selectors import LossRank
from tests.helpers.classified import (
    as_losses,
    candidates,
)
from tests.helpers.draws import generator, within


def test_loss_by_rank_draws_with_the_probabilities_it_states():
    losses = torch.tensor([2.0, 0.3, 5.0, 0.1, 1.0])
    selector, source, draws = LossRank(pressure=20, loss_fn=as_losses), generator(3), 2500
    share = torch.tensor([math.exp(-math.log(20) * i / 5) for i in range(5)])  # of the i-th largest
    expected = (share / share.sum())[[1, 3, 0, 4, 2]].tolist()
    counts = torch.zeros(5)
    for _ in range(draws):
        counts[selector.select(candidates(losses, seed=source), 1).indices] += 1
    for frequency, probability in zip((counts / draws).tolist(), expected, strict=True):
        assert within(frequency, probability, draws)
