"""Auto: bit-identical to random pruning, but where losses have paid."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from halfway import ForwardBlocker, Schedule
from halfway.selectors import Auto, LastLossProportional, Random
from tests.helpers.draws import generator, within
from tests.helpers.remembered import Net, candidates, through_a_file

CLASSES = torch.arange(10) % 5
# Eight of ten learned: below ln 2. The sixth is above ln 5, the loss of a guess, the ninth just below.
MOSTLY = [0.01, 0.3, 0.6, 0.02, 0.1, 4.0, 0.5, 0.0, 1.5, 0.4]
FEW = [2.0 + loss for loss in MOSTLY]


def having(losses, trainings=1, **settings):
    """A selector that has seen these losses, several times."""
    selector, batch = Auto(**settings), candidates(torch.arange(10), targets=CLASSES)
    for _ in range(trainings):
        selector.observe(batch, None, torch.tensor(losses))
    return selector


def chosen(selector, seed=0, count=4, targets=CLASSES):
    return selector.select(candidates(torch.arange(10), seed, targets=targets), count)


@pytest.mark.parametrize(("losses", "trainings"), [(FEW, 1), (MOSTLY, 7)], ids=["few learned", "trained often"])
def test_elsewhere_it_draws_the_very_samples_that_random_draws(losses, trainings):
    selector = having(losses, trainings)
    for seed in range(10):
        expected = Random().select(candidates(torch.arange(10), seed), 4).indices
        assert torch.equal(chosen(selector, seed).indices, expected)
    assert chosen(selector).importance.tolist() == [0.4] * 10
    assert selector.diagnostics()["chosen_by_loss"] == 0


@pytest.mark.parametrize("trainings", [1, 6])
def test_once_most_are_learned_each_stays_as_often_as_its_capped_loss_says(trainings):
    selector = having(MOSTLY, trainings)
    twin = LastLossProportional(floor=1, cap="chance", num_classes=5)
    twin.observe(candidates(torch.arange(10)), None, torch.tensor(MOSTLY))
    expected = twin.select(candidates(torch.arange(10)), 4).importance
    assert torch.equal(chosen(selector).importance, expected)
    counted = [loss for loss in MOSTLY if loss <= math.log(5)]
    mean = sum(counted) / len(counted)
    assert expected.tolist() == pytest.approx(
        [0.4 * ((x if x <= math.log(5) else mean) / mean + 1) / 2 for x in MOSTLY]
    )
    draws = torch.zeros(10, dtype=torch.float64)
    for seed in range(2000):
        draws[chosen(selector, seed).indices] += 1
    assert all(within(f, p, 2000, sigmas=4) for f, p in zip((draws / 2000).tolist(), expected.tolist(), strict=True))
    assert selector.diagnostics()["chosen_by_loss"] == 1


def test_only_samples_that_were_trained_on_count():
    selector = Auto()
    assert selector.diagnostics() == {}
    assert selector.explanation() == ""
    chosen(selector)  # nothing is known: at random
    batch = candidates(torch.arange(10), targets=CLASSES)
    selector.observe(batch, torch.tensor([0, 3]), torch.tensor([0.1, 0.2]))
    selector.observe(batch, torch.tensor([3, 5]), torch.tensor([0.3, 3.0]))
    chosen(selector)
    assert selector.diagnostics() == pytest.approx({"learned": 2 / 3, "times": 4 / 3, "chosen_by_loss": 0.5})


def test_stats_say_what_it_does_and_why():
    torch.manual_seed(0)
    net, ids = Net(), torch.arange(16)
    x, y = torch.randn(16, 5), torch.arange(16) % 4
    blocker = ForwardBlocker(net, None, 0.5, selector="auto")
    assert blocker.stats.explanation == ""
    for losses in (torch.full((8,), 2.0), torch.full((8,), 0.1), torch.full((8,), 0.1)):
        blocker(x, y, ids=ids)
        net(x[:8])
        blocker.observe(losses)
    assert blocker.stats.explanation.startswith("draws ")
    blocker(x, y, ids=ids)
    told = blocker.stats
    assert told.explanation == (
        f"draws by capped losses: {told.diagnostics['learned']:.1%} of the samples trained on so far are learned "
        f"(losses decide from 60% on), after {told.diagnostics['times']:.2f} trainings on each (and up to 6)"
    )
    assert told.diagnostics["learned"] >= 0.6
    assert "explanation" not in told.as_dict()
    other = ForwardBlocker(Net(), None, 0.5, selector="random")
    other(x, y)
    assert other.stats.explanation == ""


def test_outside_the_schedule_and_from_a_state_nothing_is_explained():
    blocker = ForwardBlocker(net := Net(), None, 0.5, selector="auto", schedule=Schedule(0, 1))
    x, y, ids = torch.randn(16, 5), torch.arange(16) % 4, torch.arange(16)
    for epoch in (0, 1):
        blocker.set_epoch(epoch)
        x_S, _ = blocker(x, y, ids=ids)
        net(x_S)
        blocker.observe(torch.full((len(x_S),), 0.1))
        assert bool(blocker.stats.explanation) == (epoch == 0)
        if epoch == 0:
            state = through_a_file(blocker.state_dict())
    blocker.load_state_dict(state)
    assert blocker.stats.explanation == ""
    assert blocker.stats.diagnostics == {}


def test_a_sample_that_comes_several_times_in_a_batch_was_trained_on_as_often():
    selector = Auto()
    twice = candidates(torch.tensor([3, 5, 3, 3, 1]), targets=CLASSES[:5])
    for _ in range(2):
        selector.observe(twice, torch.tensor([0, 2, 3, 4]), torch.full((4,), 0.1))
    chosen(selector)
    assert selector.diagnostics()["times"] == (6 + 2) / 2


def trained(selector, steps=12):
    torch.manual_seed(0)
    net, ids, source = Net(), torch.arange(32), generator(0)
    x, y = torch.randn(32, 5, generator=source), torch.arange(32) % 4
    blocker = ForwardBlocker(net, None, 0.5, selector=selector)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(steps):
        part = slice(16, None) if step % 2 else slice(16)
        x_S, y_S = blocker(x[part], y[part], ids=ids[part])
        losses = F.cross_entropy(net(x_S), y_S, reduction="none")
        blocker.observe(losses)
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, blocker


def test_training_that_underfits_is_bit_identical_to_random_pruning():
    (net, blocker), (plain, _) = trained("auto"), trained("random")
    assert blocker.stats.diagnostics["learned"] < 0.6
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), plain.parameters(), strict=True))
    other, _ = trained(Auto(learned=0))
    assert not all(torch.equal(a, b) for a, b in zip(other.parameters(), plain.parameters(), strict=True))


def test_its_state_travels():
    first, second = having(MOSTLY, 3, num_samples=10), Auto(num_samples=10)
    second.load_state_dict(through_a_file(first.state_dict()))
    second.select(candidates(torch.arange(10), targets=CLASSES), 4)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert second.diagnostics() == {}, "figures are of choices of its own"
    assert torch.equal(chosen(first).importance, chosen(second).importance)
    assert first.diagnostics() == second.diagnostics()
    assert Auto(times=3).config() != Auto().config()


def test_probabilities_are_classes_too_and_other_targets_are_errors():
    selector = having(MOSTLY)
    assert torch.equal(chosen(selector, targets=F.one_hot(CLASSES).float()).importance, chosen(selector).importance)
    with pytest.raises(ValueError, match=r"'auto' needs one class per sample.*Auto\(target=\.\.\.\)"):
        chosen(selector, targets=torch.rand(10))
    chosen(selector, targets=torch.rand(10, 5) + 1)
    with pytest.raises(ValueError, match="no probabilities"):
        selector.check()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learned": 1.5}, "learned is a share"),
        ({"times": 0}, "times is how often"),
        ({"floor": -1}, "floor"),
        ({"floor": math.nan}, "floor"),
        ({"num_samples": 0}, "at least 1"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        Auto(**settings)
