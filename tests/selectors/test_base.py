"""What every selector is: known by name, asked for a choice, told what came of it, with settings and a state."""

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from halfway import Density, ForwardBlocker, Random, Selection, Selector
from halfway.selectors import SELECTORS, Candidates, Ranking, make
from halfway.selectors.base import retained_rows
from halfway.state.sample_memory import SampleMemory
from tests.helpers import processes
from tests.helpers.at_the_cut import Net


def test_selectors_are_known_by_name():
    assert isinstance(make("density"), Density)
    assert isinstance(make("random"), Random)
    assert {"density", "random"} <= set(SELECTORS)
    mine = Random()
    assert make(mine) is mine


def test_a_selector_of_ones_own_decides_and_is_told():
    class Last(Selector):
        name = "last"
        needs = "features"
        seen = None

        def select(self, candidates, count):
            assert candidates.features.shape == (candidates.size, 4)
            assert not candidates.features.requires_grad
            assert not torch.is_grad_enabled()
            return Selection(torch.arange(candidates.size - count, candidates.size))

        def learn(self, candidates, retained):
            self.seen = (candidates.ids, retained)

    model, selector, ids = Net(), Last(), torch.arange(8) + 100
    blocker = ForwardBlocker(model, "cut", 0.5, selector=selector)
    x = torch.randn(8, 4)
    kept = blocker(x, ids=ids)
    assert torch.equal(kept, x[4:])
    assert selector.seen[0] is ids
    assert selector.seen[1].tolist() == [4, 5, 6, 7]
    assert blocker.last.importance is None
    model(kept)
    assert blocker.stats.steps_replayed == 1


class Seen(Ranking):
    """As an author writes one: settings, a choice, and what is learned from it."""

    name = "seen"
    wants_ids = "required"

    def __init__(self, step: float = 1.0, num_samples: int | None = None, key=abs) -> None:
        self.step = step
        self._times = self.remember("times", SampleMemory(1, num_samples, unknown=0.0))

    def importance(self, candidates):
        return -self._times.read(candidates.required_ids).squeeze(1)

    def learn(self, candidates, retained):
        ids = retained_rows(candidates.required_ids, retained)
        self._times.write(ids, self._times.read(ids) + self.step, candidates.ranks, candidates.size)


class Counted(Seen):
    name = "counted"

    def __init__(self, more: int = 2) -> None:
        super().__init__(step=more, num_samples=8)


def test_settings_state_and_checks_come_with_the_base_class():
    assert Seen(2).config() == {"step": 2.0, "num_samples": None, "key": "abs"}
    assert Counted(3).config() == {"more": 3}  # what this class was made with, not its base
    first, second = Counted(), Counted()
    first.learn(Candidates(3, torch.Generator(), ids=torch.tensor([1, 4, 6])), torch.tensor([0, 2]))
    assert first.state_dict()["times"].squeeze(1).tolist() == [0, 2, 0, 0, 0, 0, 2, 0]
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.state_dict()["times"], first.state_dict()["times"])
    with pytest.raises(ValueError, match=r"the selector 'counted' has \['times'\], this one has \[\]"):
        second.load_state_dict({})
    with pytest.raises(ValueError, match="the id 8"):
        second.importance(Candidates(1, torch.Generator(), ids=torch.tensor([8])))
    assert (first.diagnostics(), Random().config(), Random().state_dict()) == ({}, {}, {})


def join(rank):
    """Rank 1 has one batch less. Neither the class above nor its user has said anything about that."""
    model = DistributedDataParallel(Net())
    blocker = ForwardBlocker(model, None, 0.5, selector=Seen(), timeout=20)
    with Join([model, blocker]):
        for step in range(3 - rank):
            ids = torch.arange(4) + 4 * rank + 8 * step
            model(blocker(torch.randn(4, 4), ids=ids)).sum().backward()
    return blocker.selector.state_dict()["times"].squeeze(1)[:24]


def test_a_rank_without_batches_takes_part_in_what_any_selector_learns():
    first, second = processes.run(2, join)
    assert torch.equal(first, second)
    assert [int(first[i : i + 4].sum()) for i in range(0, 24, 4)] == [2, 2, 2, 2, 2, 0]


def test_what_a_selector_needs_is_known_without_making_one():
    assert {name: kind.needs for name, kind in SELECTORS.items() if kind.needs != "outputs"} == {
        **dict.fromkeys(["density", "density_public", "balanced", "early_exit"], "features"),
        **dict.fromkeys(
            ["random", "rotate", "last_loss", "last_loss_hard", "last_loss_proportional", "order_dp"], "nothing"
        ),
        **dict.fromkeys(["auto", "class_balanced", "balanced_remembered", "balanced_proportional"], "nothing"),
        "rho_remembered": "nothing",
        "proxy": "inputs",
    }
