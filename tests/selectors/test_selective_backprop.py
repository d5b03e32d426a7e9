"""Selective-Backprop: percentiles in a history of losses, and acceptance by their power."""

from __future__ import annotations

import pytest
import torch

from halfway.selectors.selective_backprop import SelectiveBackprop
from halfway.state.ranks import Ranks
from tests.helpers import processes
from tests.helpers.classified import (
    as_losses,
    candidates,
    history_of,
)
from tests.helpers.draws import generator, within


def same_history(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def remembering(*losses, history=8, **settings):
    selector = SelectiveBackprop(history=history, loss_fn=as_losses, **settings)
    for batch in losses:
        selector.learn(candidates(torch.tensor(batch)), None)
    return selector


def test_percentiles_are_those_in_the_history():
    selector = remembering([1.0, 2.0], [2.0, 4.0])
    found = selector.importance(candidates(torch.tensor([0.5, 1.5, 2.0, 3.0, 9.0])))
    # (rank + 1/2) / 5; the two equal ones count half.
    assert found.tolist() == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])


def test_an_empty_history_is_the_batch_itself():
    found = remembering().importance(candidates(torch.tensor([3.0, 1.0, 2.0, 2.0])))
    assert found.tolist() == pytest.approx([7 / 8, 1 / 8, 1 / 2, 1 / 2])


def test_the_history_is_a_ring_of_the_last_losses():
    selector = remembering(history=5)
    shape, seen = history_of(selector).shape, []
    for batch in ([1.0, 2.0], [3.0], [4.0, 5.0, 6.0], [7.0] * 4 + [8.0, 9.0, 10.0]):
        selector.learn(candidates(torch.tensor(batch)), torch.tensor([0]))
        seen += batch
        last = seen[-5:]
        assert history_of(selector).shape == shape
        assert history_of(selector)[: 5 - len(last)].isnan().all()
        assert history_of(selector)[5 - len(last) :].tolist() == last


def test_learning_takes_the_losses_of_the_choice_and_of_all_samples():
    calls = []

    def counted(outputs, targets):
        calls.append(1)
        return outputs

    selector = SelectiveBackprop(history=4, loss_fn=counted)
    one = candidates(torch.tensor([1.0, 2.0, 3.0]))
    selection = selector.select(one, 1)
    selector.learn(one, selection.indices)
    assert len(calls) == 1
    assert history_of(selector)[1:].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_the_acceptance_follows_the_power_law(share):
    """Losses from one distribution, whose percentiles are known without any history."""
    size, steps = 512, 150
    count, beta = round(share * size), (1 - share) / share
    selector, source = SelectiveBackprop(loss_fn=as_losses), generator(5)
    bins, accepted, offered, expected = 8, torch.zeros(8), torch.zeros(8), torch.zeros(8)
    for step in range(2 + steps):
        u = torch.rand(size, generator=source)
        now = candidates(-(-u).log1p(), seed=source)  # exponential
        rows = selector.select(now, count).indices
        selector.learn(now, rows)
        assert len(rows.unique()) == count
        if step < 2:  # the history fills
            continue
        which = (u * bins).long()
        offered += which.bincount(minlength=bins)
        accepted += which[rows].bincount(minlength=bins)
        expected.index_add_(0, which, u**beta)
    # Within each batch the power law is scaled to the exact number, which bends the average by the order of 1/B.
    assert torch.allclose(accepted / offered, expected / offered, atol=0.015)


def test_within_a_batch_probabilities_are_proportional_to_the_power_of_the_percentile():
    selector, source, draws = remembering([float(i) for i in range(9)], history=9, beta=2.0), generator(6), 1200
    losses = torch.tensor([0.5, 2.5, 4.5, 6.5, 8.5])
    expected = torch.tensor([0.15, 0.35, 0.55, 0.75, 0.95]).square()
    expected = 2 * expected / expected.sum()
    counts = torch.zeros(5)
    for _ in range(draws):
        counts[selector.select(candidates(losses, seed=source), 2).indices] += 1
    for frequency, probability in zip((counts / draws).tolist(), expected.tolist(), strict=True):
        assert within(frequency, probability, draws)


def test_beta_zero_is_uniform():
    selector, source, draws = remembering(beta=0.0), generator(7), 600
    counts = torch.zeros(4)
    for _ in range(draws):
        counts[selector.select(candidates(torch.tensor([1.0, 2.0, 3.0, 400.0]), seed=source), 2).indices] += 1
    assert all(within(frequency, 0.5, draws) for frequency in (counts / draws).tolist())


def test_a_history_goes_on_from_its_state():
    selector = remembering([1.0, 2.0, 3.0])
    other = remembering()
    state = selector.state_dict()
    other.load_state_dict(state)
    state["losses"].zero_()  # copies, both ways
    assert same_history(history_of(other), history_of(selector))
    batch = torch.tensor([0.5, 1.5, 2.5, 3.5])
    assert torch.equal(other.importance(candidates(batch)), selector.importance(candidates(batch)))
    other.learn(candidates(batch), None)
    assert not same_history(history_of(other), history_of(selector))
    with pytest.raises(ValueError, match="losses"):
        remembering(history=9).load_state_dict(selector.state_dict())
    with pytest.raises(ValueError, match="losses"):
        remembering().load_state_dict({})
    assert remembering(beta=1.0).config() != remembering(beta=2.0).config()


def _learn_together(rank):
    """Uneven batches; the second rank runs out of them."""
    ranks = Ranks()
    selector = SelectiveBackprop(history=6, loss_fn=as_losses)
    states, batches = [], [[[1.0, 2.0], [5.0], [7.0, 8.0, 9.0, 10.0]], [[3.0, 4.0, 4.5], [6.0]]][rank]
    for step in range(3):
        if step < len(batches):
            now = candidates(torch.tensor(batches[step]), ranks=ranks)
            rows = selector.select(now, 1).indices if step else None
            selector.learn(now, rows)
        else:
            ranks.send_nothing()
        states.append(selector.state_dict()["losses"])
    return states


def test_two_ranks_remember_the_same_losses():
    first, second = processes.run(2, _learn_together)
    for mine, theirs in zip(first, second, strict=True):
        assert same_history(mine, theirs)
    # In turn over the ranks; each may give its share, 3 of 6.
    assert first[0][0].isnan()
    assert first[0][1:].tolist() == [1.0, 3.0, 2.0, 4.0, 4.5]
    assert first[1].tolist() == [3.0, 2.0, 4.0, 4.5, 5.0, 6.0]
    assert first[2].tolist() == [4.5, 5.0, 6.0, 8.0, 9.0, 10.0]
