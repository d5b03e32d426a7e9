"""After advice, a training goes on as if there had been none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, Subset, TensorDataset

import halfway
from halfway.advice.untouched import untouched

from .invented import CPU


class Augmented(Dataset):  # type: ignore[type-arg]
    """Draws from every global generator."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor([i, float(torch.rand(())), random.random(), float(np.random.rand())])  # noqa: NPY002


def drawn(loader: Any, batches: int = 6) -> list[Tensor]:
    return [batch if isinstance(batch, Tensor) else batch[0] for _, batch in zip(range(batches), loader, strict=False)]


def own_generator() -> Any:
    return DataLoader(Augmented(), 4, shuffle=True, generator=torch.Generator().manual_seed(3))


def sampler_with_generator() -> Any:
    data = Augmented()
    return DataLoader(data, 4, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(3)))


def pruned_batches() -> Any:
    batches = halfway.PrunedBatchSampler(Augmented(), 4, 0.5)
    batches.set_epoch(0)
    return DataLoader(Augmented(), batch_sampler=batches)


class Counting(Sampler[int]):
    """Goes on where it stopped, also in the next epoch."""

    position = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(24):
            self.position += 1
            yield self.position % 24

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Own(Dataset):  # type: ignore[type-arg]
    """Draws from generators of its own."""

    def __init__(self) -> None:
        self.rng, self.noise = np.random.default_rng(3), torch.Generator().manual_seed(3)
        self.older, self.python = np.random.RandomState(3), random.Random(3)
        self.secret = random.SystemRandom()  # has no state

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Tensor:
        drawn = self.rng.random(), self.older.rand(), self.python.random()
        return torch.tensor([i, *drawn, float(torch.rand((), generator=self.noise))])


LOADERS = {
    "data set with generators": lambda: DataLoader(Own(), 4),
    "part of a data set with generators": lambda: DataLoader(Subset(Own(), range(20)), 4),
    "sampler with a state": lambda: DataLoader(Augmented(), 4, sampler=Counting()),
    "global generator": lambda: DataLoader(Augmented(), 4, shuffle=True),
    "own generator": own_generator,
    "sampler": sampler_with_generator,
    "pruned batches": pruned_batches,
    "list": lambda: list(torch.randn(8, 4, 2)),
}


def seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_yields_afterwards_what_it_would_have_yielded(name: str) -> None:
    make: Callable[[], Any] = LOADERS[name]
    seeded()
    expected = drawn(make())
    seeded()
    loader = make()
    with untouched(loader, CPU):
        drawn(loader, 3)
        torch.rand(5), random.random(), np.random.rand()  # noqa: NPY002
    for mine, theirs in zip(drawn(loader), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_a_part_that_has_no_state_yet_is_left_alone() -> None:
    class Unready(Augmented):
        def state_dict(self) -> dict[str, int]:
            raise RuntimeError("no pass was begun")

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise AssertionError

    with untouched(DataLoader(Unready(), 4), CPU):
        pass


def test_all_is_put_back_after_an_error() -> None:
    loader = own_generator()
    before = loader.generator.get_state(), torch.get_rng_state()

    def fail() -> None:
        with untouched(loader, CPU):
            drawn(loader)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert torch.equal(before[0], loader.generator.get_state())
    assert torch.equal(before[1], torch.get_rng_state())


def test_workers_that_are_kept_go_on_with_the_epoch_they_are_in() -> None:
    data = TensorDataset(torch.arange(12).float())
    loader = DataLoader(data, 2, num_workers=1, persistent_workers=True)
    under_way = iter(loader)
    first = next(under_way)[0]
    with untouched(loader, CPU):
        assert len(drawn(loader)) == 6
    assert torch.cat([first, *(batch[0] for batch in under_way)]).tolist() == list(range(12))
    assert loader._iterator is under_way


def test_a_stateful_loader_begins_where_it_would_have() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return stateful.StatefulDataLoader(Augmented(), 4, shuffle=True)

    seeded()
    expected = drawn(make())
    seeded()
    loader = make()
    with untouched(loader, CPU):
        drawn(loader, 3)
    for mine, theirs in zip(drawn(loader), expected, strict=True):
        assert torch.equal(mine[:, 0], theirs[:, 0])
