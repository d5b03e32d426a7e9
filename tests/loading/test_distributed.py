"""Several processes: each draws from its own samples, and all of them remember the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import halfway
from tests.helpers import processes

N, B = 96, 16


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(N, 6, generator=generator), torch.arange(N) % 3)


def sampler(rank: int, selector: str) -> halfway.PrunedBatchSampler:
    return halfway.PrunedBatchSampler(DistributedSampler(data(), 2, rank), B, 0.5, selector=selector)


def train(batches: halfway.PrunedBatchSampler, model: nn.Module, epochs: range, skip: int = 0, stop: int | None = None):
    loader = DataLoader(halfway.WithIds(data()), batch_sampler=batches)
    steps = []
    for epoch in epochs:
        batches.set_epoch(epoch, skip=skip if epoch == epochs[0] else 0)
        for x, y, ids in loader:
            steps.append(ids.tolist())
            losses = F.cross_entropy(model(x), y, reduction="none")
            batches.observe(ids, losses)
            losses.mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.5 * p.grad
            model.zero_grad()
            if len(steps) == stop:
                return steps
    return steps


def net() -> nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)))


def _trained(rank: int, selector: str) -> Any:
    batches, model = sampler(rank, selector), net()
    if selector == "balanced_remembered":
        batches.watch(model)
    steps = train(batches, model, range(3))
    return steps, copy.deepcopy(batches.state_dict()["selector"])


@pytest.mark.parametrize("selector", ["last_loss", "rotate", "balanced_remembered"])
def test_all_ranks_remember_what_all_of_them_saw(selector: str) -> None:
    (steps_0, state_0), (steps_1, state_1) = processes.run(2, _trained, selector)
    for mine, other in zip(steps_0, steps_1, strict=True):
        assert not set(mine) & set(other)
    for name, values in state_0.items():
        torch.testing.assert_close(
            torch.as_tensor(values), torch.as_tensor(state_1[name]), rtol=0, atol=0, equal_nan=True
        )
    if selector == "last_loss":
        known = (~state_0["losses"].isnan()).flatten().nonzero().flatten().tolist()
        assert set(known) == {i for steps in (*steps_0, *steps_1) for i in steps}


def _saved_by_one(rank: int) -> Any:
    batches = halfway.PrunedBatchSampler(
        DistributedSampler(data(), 2, rank), B, 0.5, selector="auto", targets=data().tensors[1], timeout=10
    )
    model = net()
    train(batches, model, range(1))
    state = copy.deepcopy(batches.state_dict()) if rank == 0 else None
    torch.distributed.barrier()  # the other rank comes to its next epoch only when the first one has saved
    train(batches, model, range(1, 2))
    return state, copy.deepcopy(batches.state_dict()["selector"])


def test_at_the_end_of_an_epoch_one_rank_can_save_alone() -> None:
    (state, last), (_, other) = processes.run(2, _saved_by_one)
    assert (state["selector"]["times"] > 0).sum() == N // 2, "half of the samples of both ranks"
    torch.testing.assert_close(last, other, rtol=0, atol=0, equal_nan=True)


def _sharded_after_drawing(rank: int) -> None:
    """Every process draws all batches and trains on its share of them, as with Accelerate."""
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector="last_loss", timeout=10)
    batches.set_epoch(0)
    for k, batch in enumerate(batches):
        if k % 2 == rank:
            batches.observe(torch.tensor(batch), torch.ones(len(batch)))
    if rank == 0:
        batches.state_dict()
    torch.distributed.barrier()


def test_so_can_it_where_batches_are_shared_out_after_they_were_drawn() -> None:
    processes.run(2, _sharded_after_drawing)


def _stopped(rank: int, path: str) -> Any:
    batches, model = sampler(rank, "last_loss"), net()
    steps = train(batches, model, range(3), stop=4)
    torch.save(batches.state_dict(), f"{path}/{rank}.pt")
    torch.save(model.state_dict(), f"{path}/model.pt") if rank == 0 else None
    return steps


def _resumed(rank: int, path: str, of: int | None) -> Any:
    batches, model = sampler(rank, "last_loss"), net()
    batches.load_state_dict(torch.load(f"{path}/{rank if of is None else of}.pt", weights_only=True))
    model.load_state_dict(torch.load(f"{path}/model.pt", weights_only=True))
    return train(batches, model, range(1, 3), skip=1)


def test_with_a_state_of_every_rank_an_epoch_goes_on_where_it_was(tmp_path) -> None:
    whole = processes.run(2, _trained, "last_loss")
    first = processes.run(2, _stopped, str(tmp_path))
    second = processes.run(2, _resumed, str(tmp_path), None)
    for rank in range(2):
        assert first[rank] + second[rank] == whole[rank][0]


def test_the_state_of_another_rank_cannot_go_on_in_the_middle_of_an_epoch(tmp_path) -> None:
    processes.run(2, _stopped, str(tmp_path))
    _results, errors = processes.outcomes(2, _resumed, str(tmp_path), 0)
    assert "saved by another rank" in errors[1]


def _different(rank: int) -> None:
    halfway.PrunedBatchSampler(data(), B, 0.5, seed=rank)


def test_ranks_with_other_settings_are_an_error() -> None:
    _results, errors = processes.outcomes(2, _different)
    assert all("different configurations (seed: 0 on rank 0, 1 on rank 1)" in error for error in errors)
