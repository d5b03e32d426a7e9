"""Models that mix samples, openly or where no value shows it at first: what mixes is never replayed."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import halfway
from tests.helpers.replays import (
    density,
    gradients,
    relative_difference,
)


def test_demanding_a_replay_raises_instead_of_falling_back(x):
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.b(self.a(x.roll(1, 0)))

    model = Mixing().train()
    before = copy.deepcopy(model.state_dict())
    blocker = halfway.ForwardBlocker(model, "a", 0.5, reuse="replay")
    with pytest.raises(halfway.ReplayError, match=r"depends on other samples .* aten.roll"):
        blocker(x)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class GatedMixing(nn.Module):
    """Mixes samples through a gate that is closed at first, so that no value shows it."""

    def __init__(self):
        super().__init__()
        self.first, self.gate, self.second = nn.Linear(5, 6), nn.Parameter(torch.zeros(1)), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        h = self.first(x)
        return self.head(self.second(h + self.gate * h.roll(1, 0)).tanh())


def test_what_is_behind_a_gate_that_may_open_is_computed(x):
    model = GatedMixing().train()
    blocker = halfway.ForwardBlocker(model, "second", 0.5, selector=density())
    for gate in (0.0, 0.5):
        with torch.no_grad():
            model.gate.fill_(gate)
        with pytest.warns(UserWarning, match=r"computes 55% .* aten.roll") if not gate else contextlib.nullcontext():
            retained = blocker(x)
        found = gradients(model, retained)
        assert relative_difference(found, gradients(model, retained)) < 1e-6
    assert (blocker.stats.operations_replayed, blocker.stats.operations_computed) == (2, 2)
    assert "computed: aten.roll.default, which works along the batch" in blocker.explain()


class ZeroBranch(nn.Module):
    """A zero-initialised layer on (time, batch) rows: at first all its rows are equal, whoever they belong to."""

    def __init__(self):
        super().__init__()
        self.zero = nn.Linear(5, 6)
        nn.init.zeros_(self.zero.weight)
        self.cut, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        time_major = x.transpose(0, 1).reshape(-1, 5)
        h = self.zero(time_major).view(x.shape[1], len(x), 6).transpose(0, 1)
        return self.head(self.cut(h.tanh()).sum(1))


def test_an_operation_is_not_trusted_before_its_rows_differ():
    model, x = ZeroBranch().train(), torch.randn(4, 4, 5)
    blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=density())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(20):
        reference = copy.deepcopy(model)
        retained = blocker(x)
        found = gradients(model, retained)
        assert relative_difference(found, gradients(reference, retained)) < 1e-5
        optimizer.step()
    stats = blocker.stats
    assert stats.operations_computed >= 1
    assert stats.operations_replayed >= 10


class RolledAndDropped(nn.Module):
    """Mixes samples, then hides most of it: rows that drop path sets to zero agree whatever went before."""

    def __init__(self):
        super().__init__()
        self.stem, self.cut, self.head = nn.Linear(5, 5), nn.Identity(), nn.Linear(5, 2)

    def forward(self, x):
        kept = torch.empty(len(x), 1).bernoulli_(0.3)
        return self.head(self.cut(self.stem(x.roll(1, 0) * kept)))


@pytest.mark.filterwarnings("ignore:halfway computes")
def test_mixing_that_drop_path_hides_at_first_is_never_replayed():
    for seed in range(40):
        torch.manual_seed(seed)
        model = RolledAndDropped()
        blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=density())
        for _ in range(6):
            model(blocker(torch.randn(5, 5)))
        assert blocker.stats.operations_replayed == 0


class Flipped(nn.Module):
    """Where the retained rows lie symmetrically, flipping them is the same as flipping the batch."""

    def __init__(self):
        super().__init__()
        self.stem, self.cut, self.head = nn.Linear(5, 5), nn.Identity(), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.cut(self.stem(x.flip(0))))


@pytest.mark.filterwarnings("ignore:halfway computes")
def test_a_flipped_batch_is_never_replayed_also_if_the_rows_lie_symmetrically():
    for seed in range(40):
        torch.manual_seed(seed)
        model = Flipped()
        # The first call shows autocast, so that the second step is rehearsed anew, in the middle of training.
        blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=density(), seed=seed)
        for _ in range(6):
            retained = blocker(torch.randn(4, 5))
            with torch.autocast("cpu", torch.bfloat16):
                model(retained)
        assert blocker.stats.operations_replayed == 0
