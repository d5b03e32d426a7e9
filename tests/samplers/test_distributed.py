"""Samplers on two real processes: one decision, shared out evenly, from the losses of both."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from halfway import Schedule
from halfway.samplers import RS2, InfoBatch, make
from tests.helpers import processes
from tests.helpers.sampled import EVERY

N, EPOCHS = 31, 6


def losses_of(ids: torch.Tensor, epoch: int) -> torch.Tensor:
    return torch.rand(EPOCHS, N, generator=torch.Generator().manual_seed(9))[epoch, ids]


def options_of(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {
        **options,
        **{"ucb": {"period": 2}, "epsilon_greedy": {"period": 2}, "dyn_unc": {"window": 2}}.get(name, {}),
    }


def train(sampler: Any, epoch: int, skip: int = 0) -> list[tuple[int, float]]:
    """One rank's part of an epoch: its ids and weights."""
    sampler.set_epoch(epoch, skip)
    mine = list(sampler)
    assert len(mine) == len(sampler)
    for first in range(0, len(mine), 4):
        ids = torch.tensor(mine[first : first + 4])
        sampler.observe(ids, losses_of(ids, epoch))
    return [(int(i), i.weight) for i in mine]


def all_methods(rank: int, stop_at: int, done: int) -> list[Any]:
    results = []
    for name, options in EVERY:
        options = options_of(name, options)
        sampler = make(name, N, 0.4, schedule=Schedule(1), **options)
        epochs = [(train(sampler, epoch), sampler.retained) for epoch in range(stop_at)]
        sampler.set_epoch(stop_at)
        part = list(sampler)[:done]
        sampler.observe(torch.tensor(part), losses_of(torch.tensor(part), stop_at))
        state = sampler.state_dict()
        file = io.BytesIO()
        torch.save(state, file)
        sampler.close()
        file.seek(0)
        # The rest by another sampler, as after an interruption.
        sampler = make(name, N, 0.4, schedule=Schedule(1), **options)
        sampler.load_state_dict(torch.load(file, weights_only=True))
        rest = train(sampler, stop_at, skip=done)
        epochs.append(([(int(i), i.weight) for i in part] + rest, sampler.retained))
        epochs += [(train(sampler, epoch), sampler.retained) for epoch in range(stop_at + 1, EPOCHS)]
        results.append((epochs, sampler.state_dict()))
        sampler.close()
    return results


def test_two_ranks_make_one_decision_share_it_evenly_and_go_on_after_an_interruption() -> None:
    both = processes.run(2, all_methods, 3, 5)
    for (name, options), (zero, zero_state), (one, one_state) in zip(EVERY, *both, strict=True):
        alone = make(name, N, 0.4, schedule=Schedule(1), **options_of(name, options))
        trimmed = 0
        for epoch in range(EPOCHS):
            (mine, retained), (theirs, also) = zero[epoch], one[epoch]
            assert torch.equal(retained, also)
            assert len(mine) == len(theirs) == len(retained) // 2
            # A process that trains on the same samples alone, in the same order, knows and decides the same.
            alone.set_epoch(epoch)
            assert torch.equal(retained, alone.retained), name
            order = [(int(i), i.weight) for i in alone]
            assert mine == order[: len(mine) * 2][::2]
            assert theirs == order[: len(mine) * 2][1::2]
            seen = torch.tensor([i for i, _ in order[: len(mine) * 2]])
            trimmed += len(order) - len(seen)
            alone.observe(seen, losses_of(seen, epoch))
        assert trimmed > 0
        for key in ("retained", "weights"):
            assert torch.equal(zero_state[key], one_state[key])
        assert zero_state["counters"] == one_state["counters"]
        for key, values in zero_state["memory"].items():
            assert torch.equal(values.nan_to_num(-1), one_state["memory"][key].nan_to_num(-1)), name
            assert torch.equal(values.nan_to_num(-1), alone.state_dict()["memory"][key].nan_to_num(-1)), name


def halves(rank: int) -> tuple[list[float], list[float], list[int]]:
    sampler = InfoBatch(8, 0.5, threshold=0.5)
    sampler.set_epoch(0)
    ids = torch.arange(4) + 4 * rank
    sampler.observe(ids, ids.float())
    sampler.set_epoch(1)
    return sampler.memory.values[:, 0].tolist(), sampler.weights(torch.arange(8)).tolist(), sampler.retained.tolist()


def test_what_one_rank_observes_the_other_knows() -> None:
    zero, one = processes.run(2, halves)
    assert zero == one
    known, weights, retained = zero
    assert known == list(range(8))
    assert set(range(4, 8)) < set(retained)
    assert weights == [2.0 if i < 4 and i in retained else 1.0 for i in range(8)]


def impossible(rank: int) -> list[str]:
    errors = []
    for make_one in (lambda: RS2(N, 0.5, seed=rank), lambda: RS2(4, 0.75)):
        with pytest.raises(ValueError, match="rank") as caught:
            make_one()
        errors.append(str(caught.value))
    return errors


def test_ranks_that_cannot_work_together_say_so_at_once() -> None:
    for different, too_few in processes.run(2, impossible):
        assert "seed: 0 on rank 0, 1 on rank 1" in different
        assert "1 of 4 samples are retained, but there are 2 ranks; lower prune_ratio" in too_few
