"""Hard samples are preferred and near-twins compete, by what was noted and observed of the samples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfway import ForwardBlocker
from halfway.selectors import BalancedProportional, LastLossProportional
from tests.helpers.balanced import Net, assert_equally_likely, clustered, drawn
from tests.helpers.draws import generator, randn, within
from tests.helpers.remembered import NAN, candidates, through_a_file

SIZE = 12


def knowing(x, losses, **settings):
    """A selector that has seen these features and losses; NaN: not yet."""
    selector, ids = BalancedProportional(**settings), torch.arange(len(x))
    losses = torch.as_tensor(losses)
    known = losses.isfinite().nonzero().squeeze(1)
    selector.note(candidates(ids), None, x)
    selector.observe(candidates(ids), known, losses[known])
    selector.check()
    return selector


def draws_of(selector, count, draws, size=SIZE, **others):
    source = generator(1)
    return drawn(lambda: selector.select(candidates(torch.arange(size), source, **others), count).indices, size, draws)


def some_losses(size=SIZE, seed=0):
    return (1.5 * randn(size, seed=seed)).exp()


@pytest.mark.parametrize("classes", [None, torch.arange(SIZE) % 3])
def test_each_sample_stays_as_often_as_its_last_loss_says(classes):
    losses, draws, settings = some_losses(), 700, {"scale": "bounded", "floor": 0.2}
    losses[3] = NAN
    selector = knowing(clustered(SIZE), losses, **settings)
    assert (selector.needs, selector.wants_ids, selector.wants_losses) == ("nothing", "required", "required")
    other = LastLossProportional(**settings)
    other._losses.load_state_dict({"values": losses.unsqueeze(1)})
    prescribed = other.select(candidates(torch.arange(SIZE)), 5).importance
    found = selector.select(candidates(torch.arange(SIZE), targets=classes), 5)
    assert torch.equal(found.importance, prescribed)
    assert float(prescribed.max() - prescribed.min()) > 0.3
    chosen = draws_of(selector, 5, draws, targets=classes)
    assert (chosen.sum(1) == 5).all()
    for frequency, probability in zip(chosen.mean(0).tolist(), prescribed.tolist(), strict=True):
        assert within(frequency, probability, draws, sigmas=4)


def test_near_twins_compete_and_the_harder_one_stays_more_often():
    x = randn(6, 5).repeat(2, 1) + 1e-3 * randn(SIZE, 5, seed=1)
    losses = torch.cat([torch.full((6,), 3.0), torch.full((6,), 1.0)])
    chosen = draws_of(knowing(x, losses), 4, 400)
    alone, together = chosen.mean(0), (chosen[:, :6] * chosen[:, 6:]).mean(0)
    # Of each pair, 2/3 of a sample stays: never both, where independent draws would retain both now and then.
    assert (together == 0).all()
    assert (alone[:6] * alone[6:] > 0.05).all()
    assert (alone[:6] > alone[6:] + 0.1).all()


def test_samples_compete_within_their_class():
    """Pairs of near-twins of different classes: each class gets the share that its losses give it."""
    x = randn(6, 5).repeat(2, 1)
    classes = torch.arange(SIZE) // 6
    losses = torch.cat([torch.full((6,), 2.0), torch.full((6,), 1.0)])
    chosen = draws_of(knowing(x, losses, floor=0.0), 6, 200, targets=classes)
    assert (chosen[:, :6].sum(1) == 4).all()
    assert (chosen[:, 6:].sum(1) == 2).all()


def test_equal_or_unknown_losses_are_the_equal_chances_of_balanced_sampling():
    for losses in ([0.7] * SIZE, [NAN] * SIZE):
        assert_equally_likely(draws_of(knowing(clustered(SIZE), losses), 5, 300), 5 / SIZE)


def test_the_loss_is_no_coordinate():
    """Two pairs of twins with different losses in each: if losses were coordinates, like would compete with like."""
    x = torch.tensor([[0.0], [0.0], [10.0], [10.0]])
    chosen = draws_of(knowing(x, [1.0, 4.0, 1.0, 4.0], floor=0.0), 2, 300, size=4)
    assert (chosen[:, :2].sum(1) == 1).all()
    assert within(float(chosen[:, 1].mean()), 0.8, 300)


def test_the_state_travels_with_losses_and_features():
    first, second = knowing(clustered(SIZE), some_losses()), BalancedProportional()
    state = through_a_file(first.state_dict())
    assert sorted(state) == ["features", "losses", "width"]
    second.load_state_dict(state)
    for seed in range(5):
        a, b = (selector.select(candidates(torch.arange(SIZE), seed), 5) for selector in (first, second))
        assert torch.equal(a.indices, b.indices)
    assert first.config() == second.config()
    assert BalancedProportional(floor=0.5).config() != first.config()


def test_it_learns_in_a_training_loop():
    torch.manual_seed(0)
    net, ids, x = Net(), torch.arange(16), torch.randn(16, 3, 6, 6)
    blocker = ForwardBlocker(net, None, 0.5, selector="balanced_proportional")
    for _ in range(4):
        part, y, rows = blocker(x, ids % 4, ids, ids=ids)
        losses = F.cross_entropy(net(part), y, reduction="none")
        blocker.observe(losses)
        losses.mean().backward()
        state = blocker.selector.state_dict()
        torch.testing.assert_close(state["losses"][rows].squeeze(1), losses.detach())
        assert state["features"][rows].isfinite().all()
    assert blocker.stats.effective_ratio == 0.5


def test_mistakes_name_this_selector():
    with pytest.raises(ValueError, match=r"BalancedProportional\(module="):
        BalancedProportional().watches(nn.Sequential(nn.Conv2d(3, 3, 3)))
    with pytest.raises(ValueError, match="num_classes"):
        BalancedProportional(cap="chance")
    with pytest.raises(ValueError, match="dim must be at least 1"):
        BalancedProportional(dim=0)
