"""The early exit in a training: steps are replayed, and the head learns in each of them, resumed and on two ranks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfway import ForwardBlocker, Schedule
from halfway.selectors import Candidates, EarlyExit
from tests.helpers import processes
from tests.helpers.draws import generator, randn
from tests.helpers.remembered import through_a_file

C = 4


def candidates(features, targets):
    return Candidates(len(features), generator(0), features, targets=targets)


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    assert all(torch.equal(torch.as_tensor(actual[name]), torch.as_tensor(expected[name])) for name in expected)


class Block(nn.Module):
    """A residual block with BatchNorm."""

    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x):
        return (x + self.body(x)).relu()


def resnet():
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(stem, Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, C))


def images(step, size=16):
    return randn(size, 3, 12, 12, seed=step), torch.randint(C, (size,), generator=generator(step))


def steps_of(model, blocker, steps, autocast=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        x, y = blocker(*images(step))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("pick", ["proportional", "hard"])
def test_a_small_resnet_replays_and_the_head_learns_in_every_step(pick):
    model, selector = resnet(), EarlyExit(pick)
    schedule = Schedule(2, 5, unit="step")
    blocker = ForwardBlocker(model, "1", 0.5, selector=selector, schedule=schedule, reuse="replay")
    for step in range(7):
        steps_of(model, blocker, [step])
        assert selector.state_dict()["batches"] == step + 1
    assert (blocker.stats.pruned_steps, blocker.stats.steps_replayed) == (3, 3)
    assert selector.state_dict()["width"] == 32


def test_a_training_goes_on_bit_for_bit():
    straight, model = resnet(), resnet()
    whole = ForwardBlocker(straight, "1", 0.5, selector="early_exit")
    steps_of(straight, whole, range(6))
    first = ForwardBlocker(model, "1", 0.5, selector="early_exit")
    steps_of(model, first, range(3))
    state = through_a_file(first.state_dict())
    first.remove()
    second = ForwardBlocker(model, "1", 0.5, selector="early_exit")
    second.load_state_dict(state)
    steps_of(model, second, range(3, 6))
    assert_same(second.selector.state_dict(), whole.selector.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), straight.parameters(), strict=True))


def test_under_autocast_the_head_is_taught_in_float32():
    model, seen = resnet(), []

    class Seeing(EarlyExit):
        name = "seeing"

        def learn(self, candidates, retained):
            seen.append((candidates.features, candidates.targets))
            super().learn(candidates, retained)

    blocker = ForwardBlocker(model, "1", 0.5, selector=Seeing())
    steps_of(model, blocker, [0], autocast=True)
    blocker.prune_ratio = 0.0
    steps_of(model, blocker, [1, 2], autocast=True)
    assert seen[-1][0].dtype == torch.bfloat16
    slow = EarlyExit(num_classes=C)
    for features, targets in seen:
        slow.learn(candidates(features.float(), targets), None)
    assert_same(blocker.selector.state_dict(), slow.state_dict())


def train(rank):
    model = DistributedDataParallel(resnet())
    selector = EarlyExit()
    blocker = ForwardBlocker(model, "1", 0.5, selector=selector, schedule=Schedule(2, unit="step"), timeout=20)
    for step in range(5):
        x, y = blocker(*images(2 * step + rank))
        F.cross_entropy(model(x), y).backward()
    return selector.state_dict(), blocker.stats.steps_replayed


def test_two_ranks_learn_the_same_and_what_one_learns_from_both():
    (first, replayed), (second, _) = processes.run(2, train)
    assert_same(first, second)
    assert (replayed, first["batches"]) == (3, 5)
    # Nothing was updated, and BatchNorm saw each rank's own samples.
    alone, model = EarlyExit(num_classes=C), resnet()
    for step in range(5):
        parts = [images(2 * step + rank) for rank in range(2)]
        with torch.no_grad():
            features = torch.cat([model[:2](x) for x, _ in parts])
        alone.learn(candidates(features, torch.cat([y for _, y in parts])), None)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(torch.as_tensor(first[name]), torch.as_tensor(value), rtol=1e-4, atol=1e-5)
