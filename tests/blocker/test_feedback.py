"""What a selector is told after its choice: reported losses, and what enters the layer it watches."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from halfway import ForwardBlocker, Schedule, Selection, Selector
from halfway.selectors import BalancedRemembered, LastLoss, Rotate

from ..helpers import processes


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(F.relu(self.body(x)))


class Told(Selector):
    """Writes down what it is told, and retains the first samples."""

    name = "told"
    wants_ids = "optional"
    wants_losses = "optional"

    def __init__(self):
        self.noted, self.observed, self.learned = [], [], []

    def watches(self, root):
        return root.head

    def select(self, candidates, count):
        return Selection(torch.arange(count))

    def learn(self, candidates, retained):
        self.learned.append(retained)

    def note(self, candidates, retained, watched):
        assert not torch.is_grad_enabled()
        self.noted.append((candidates.ids, retained, watched))

    def observe(self, candidates, retained, losses):
        assert not losses.requires_grad
        self.observed.append((candidates.ids, retained, losses))


def batch(size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator)


def test_losses_and_watched_inputs_arrive_with_their_rows():
    model, selector = Net(), Told()
    blocker = ForwardBlocker(model, None, 0.5, selector=selector)
    x, y = batch()
    ids = torch.arange(8) + 10
    part, part_y = blocker(x, y, ids=ids)
    losses = F.cross_entropy(model(part), part_y, reduction="none")
    blocker.observe(losses)
    blocker.observe(losses)  # the second time in a step changes nothing
    ((seen_ids, rows, watched),) = selector.noted
    assert seen_ids is ids
    assert torch.equal(rows, torch.arange(4))
    assert torch.equal(watched, F.relu(model.body(part)).detach())
    assert not watched.requires_grad
    ((_, rows, seen),) = selector.observed
    assert torch.equal(rows, torch.arange(4))
    assert torch.equal(seen, losses.detach())
    losses.mean().backward()
    assert model.head.weight.grad is not None


def test_steps_that_prune_nothing_are_told_too():
    model, selector = Net(), Told()
    blocker = ForwardBlocker(model, None, 0.5, selector=selector, schedule=Schedule(1))
    blocker.set_epoch(0)
    x, y = batch()
    losses = F.cross_entropy(model(blocker(x, y)[0]), y, reduction="none")
    blocker.observe(losses)
    assert selector.learned == [None]
    assert selector.noted[0][1] is selector.observed[0][1] is None
    assert len(selector.noted[0][2]) == len(selector.observed[0][2]) == 8


def test_evaluation_is_not_told():
    model, selector = Net(), Told()
    blocker = ForwardBlocker(model, None, 0.5, selector=selector)
    x, y = batch()
    part = blocker(x, y)[0]
    with torch.no_grad():
        model(x)
    assert not selector.noted
    model(part)
    assert len(selector.noted) == 1
    model.eval()
    with pytest.warns(UserWarning, match="eval mode"):
        blocker(x, y)
    model(x)
    blocker.observe(torch.zeros(8))
    assert len(selector.noted) == 1
    assert not selector.observed


def test_removing_and_copying_leave_no_trace():
    model, selector = Net(), Told()
    blocker = ForwardBlocker(model, None, 0.5, selector=selector)
    x, y = batch()
    part = blocker(x, y)[0]
    twin = copy.deepcopy(model)
    assert torch.equal(twin(part), model.head(F.relu(model.body(part))))
    assert len(selector.noted) == 1, "by the model, not by its copy"
    blocker(x, y)
    blocker.remove()
    assert "_call_impl" not in vars(model.head)
    with pytest.raises(RuntimeError, match="was removed"):
        blocker.observe(torch.zeros(4))


@pytest.mark.parametrize("losses", [torch.zeros(8), torch.zeros(()), torch.zeros(4, 1), [0.0] * 4])
def test_losses_of_another_shape_are_refused(losses):
    blocker = ForwardBlocker(Net(), None, 0.5, selector=Told())
    blocker(*batch())
    with pytest.raises(ValueError, match=r"one loss per sample, shape \(4,\).*reduction='none'"):
        blocker.observe(losses)


def test_a_selector_that_does_not_learn_ignores_losses():
    blocker = ForwardBlocker(Net(), None, 0.5, selector="random")
    blocker(*batch())
    blocker.observe(torch.zeros(3))


def test_losses_that_never_come_are_missed_once():
    model = Net()
    blocker = ForwardBlocker(model, None, 0.5, selector="last_loss")
    ids = torch.arange(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blocker(*batch(), ids=ids)  # they may still come
    with pytest.warns(UserWarning, match=r"call blocker.observe\(losses\)") as caught:
        blocker(*batch(), ids=ids)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blocker(*batch(), ids=ids)


def test_balanced_does_not_insist_on_losses():
    model = Net()
    blocker = ForwardBlocker(model, "body", 0.5, selector="balanced")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ids in (torch.arange(8), torch.arange(8), None):
            model(blocker(*batch(), ids=ids)[0])


@pytest.mark.parametrize("selector", ["rotate", "last_loss", BalancedRemembered()])
def test_missing_ids_are_named(selector):
    blocker = ForwardBlocker(Net(), None, 0.5, selector=selector)
    with pytest.raises(ValueError, match=r"ids=ids.*WithIds"):
        blocker(*batch())


def test_a_compiled_model_does_not_show_what_enters_a_layer():
    with pytest.raises(TypeError, match="compiled"):
        ForwardBlocker(torch.compile(Net()), None, 0.5, selector=BalancedRemembered())


@pytest.mark.parametrize("make", [LastLoss, Rotate, lambda: BalancedRemembered()])
def test_what_is_remembered_survives_a_restart(make):
    """Trained on, saved, loaded into a new blocker: the same choices follow."""
    x, y = batch(8)
    ids = torch.arange(8)

    def step(model, blocker):
        part, part_y = blocker(x, y, ids=ids)
        losses = F.cross_entropy(model(part), part_y, reduction="none")
        blocker.observe(losses)
        return blocker.last.indices

    torch.manual_seed(0)
    model = Net()
    blocker = ForwardBlocker(model, None, 0.5, selector=make())
    for _ in range(3):
        step(model, blocker)
    state = copy.deepcopy(blocker.state_dict())
    expected = [step(model, blocker) for _ in range(4)]
    blocker.remove()
    again = ForwardBlocker(model, None, 0.5, selector=make())
    again.load_state_dict(state)
    again_found = [step(model, again) for _ in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(expected, again_found, strict=True))


def _uneven(rank, name):
    """Rank 1 has fewer batches, and its last one is smaller."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net())
    selector = BalancedRemembered() if name == "remembered" else name
    blocker = ForwardBlocker(ddp, None, 0.5, selector=selector)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    sizes = [8, 8, 8, 8] if rank == 0 else [8, 6]
    with Join([ddp, blocker]):
        for step, size in enumerate(sizes):
            x, y = batch(size, seed=10 * step + rank)
            ids = torch.arange(size) + 20 * step + 100 * rank
            x, y = blocker(x, y, ids=ids)
            losses = F.cross_entropy(ddp(x), y, reduction="none")
            blocker.observe(losses)
            losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    state = blocker.state_dict()["selector"]
    return {k: v.nan_to_num(nan=-1.0) if isinstance(v, torch.Tensor) else v for k, v in state.items()}


@pytest.mark.parametrize("name", ["last_loss", "rotate", "remembered", "selective_backprop"])
def test_uneven_ranks_remember_the_same(name):
    one, other = processes.run(2, _uneven, name)
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
