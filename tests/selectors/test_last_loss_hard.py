"""The largest last losses stay, and neighbouring numbers are told apart."""

from __future__ import annotations

import torch

from halfway.selectors import LastLossHard
from tests.helpers.draws import generator, within
from tests.helpers.remembered import NAN, candidates, frequencies, knowing


def test_hard_retains_the_largest_last_losses():
    losses = torch.rand(20, generator=generator(3)).tolist()
    selector = knowing(losses, LastLossHard)
    assert (selector.needs, selector.wants_ids, selector.wants_losses) == ("nothing", "required", "required")
    ids = torch.randperm(20, generator=generator(4))
    for seed in range(5):
        found = selector.select(candidates(ids, seed), 7)
        expected = sorted(range(20), key=lambda row: -losses[ids[row]])[:7]
        assert found.indices.tolist() == sorted(expected)
        torch.testing.assert_close(found.importance.float(), torch.tensor(losses)[ids])
    # What was reported last counts, and only of the retained.
    selector.observe(candidates(ids), torch.tensor([3, 11]), torch.tensor([5.0, -1.0]))
    losses[ids[3]], losses[ids[11]] = 5.0, -1.0
    expected = sorted(range(20), key=lambda row: -losses[ids[row]])
    assert selector.select(candidates(ids), 1).indices.tolist() == [3]
    assert selector.select(candidates(ids), 19).indices.tolist() == sorted(expected[:19])


def test_hard_takes_the_unknown_for_average_and_draws_among_equals():
    selector, source = knowing([1.0, 9.0, NAN, 2.0, NAN, NAN, 4.1], LastLossHard), generator(0)
    alone, _ = frequencies(selector, torch.arange(7), 3, 600, source)  # the mean is 4.025
    assert alone[[1, 6]].tolist() == [1, 1]
    assert alone[[0, 3]].tolist() == [0, 0]
    assert all(within(f, 1 / 3, 600) for f in alone[[2, 4, 5]].tolist())
    equal = knowing([2.0, 0.0, 0.0, 0.0, 0.0], LastLossHard)
    alone, _ = frequencies(equal, torch.arange(5), 3, 600, source)
    assert alone[0] == 1
    assert all(within(f, 1 / 2, 600) for f in alone[1:].tolist())


def test_hard_tells_neighbouring_numbers_apart():
    one = torch.tensor(1.0)
    up = torch.nextafter(one, torch.tensor(2.0)).item()
    losses = [1.0, up, 0.0, 1e-44, 3e-44, -1.0, -up, 1e30]
    selector = knowing(losses, LastLossHard)
    order = sorted(range(8), key=lambda i: -losses[i])
    for seed in range(20):
        for count in range(1, 8):
            assert selector.select(candidates(torch.arange(8), seed), count).indices.tolist() == sorted(order[:count])
