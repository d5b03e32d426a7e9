"""Several processes, for real: DDP, uneven batches, models that communicate, running statistics."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from halfway import ForwardBlocker, Schedule
from tests.helpers import processes
from tests.helpers.ranks import (
    CLASSES,
    GROUP,
    N,
    assert_same_everywhere,
    averaged,
    batch,
    gradients,
    selector,
    small_net,
)

# ----------------------------------------------------------------------------------------------------------- DDP


def train_ddp(rank: int, options: dict[str, Any], accumulate: bool) -> dict[str, Any]:
    model = small_net()
    ddp = DDP(model, **options)
    blocker = ForwardBlocker(ddp, at="0", prune_ratio=0.4, selector=selector())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
    chosen = []
    for step in range(6):
        reference = copy.deepcopy(model)
        expected: list[Tensor] = []
        for micro in range(2 if accumulate else 1):
            x, y = batch(rank, 10 * step + micro)
            x_retained, y_retained = blocker(x, y)
            assert blocker.last is not None
            chosen.append(blocker.last.indices.tolist())
            F.cross_entropy(reference(x[blocker.last.indices]), y[blocker.last.indices]).backward()
            with ddp.no_sync() if accumulate and micro == 0 else contextlib.nullcontext():
                F.cross_entropy(ddp(x_retained), y_retained).backward()
            assert_same_everywhere(blocker.selector.state_dict())
        expected = averaged(gradients(reference))
        for found, wanted in zip(gradients(model), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
        optimizer.step()
        optimizer.zero_grad()
    stats = blocker.stats
    assert stats.steps_replayed == stats.steps, stats.recompute_reasons
    seen = (stats.steps_replayed, stats.recompute_reasons)
    return {"chosen": chosen, "weights": [p.detach() for p in model.parameters()], "seen": seen}


@pytest.mark.parametrize(
    ("name", "size", "options", "accumulate"),
    [
        ("DDP, 2 processes", 2, {}, False),
        ("DDP, no_sync", 2, {}, True),
        ("DDP, static_graph", 2, {"static_graph": True}, False),
        ("DDP, find_unused_parameters", 2, {"find_unused_parameters": True}, False),
        ("DDP, without broadcast_buffers", 2, {"broadcast_buffers": False}, False),
        ("DDP, 4 processes, gradient_as_bucket_view", 4, {"gradient_as_bucket_view": True}, False),
    ],
)
def test_ddp_averages_the_gradients_of_what_each_rank_retains(
    name: str, size: int, options: dict[str, Any], accumulate: bool, feature
) -> None:
    found = processes.run(size, train_ddp, options, accumulate)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0]["weights"], other["weights"], strict=True))
        assert found[0]["chosen"] != other["chosen"]
    feature(GROUP, name, found[0]["seen"])


def learn_in_two_ways(rank: int) -> dict[str, Tensor]:
    model = DDP(small_net())
    blocker = ForwardBlocker(model, at="0", prune_ratio=0.4, selector=selector(), schedule=Schedule(2, 5, unit="step"))
    for step in range(8):
        x, y = blocker(*batch(rank, step, N if rank == 0 else 8))
        F.cross_entropy(model(x), y).backward()
        assert_same_everywhere(blocker.selector.state_dict())
    return blocker.selector.state_dict()


def test_ranks_learn_the_same_outside_of_the_schedule_and_from_different_batch_sizes() -> None:
    state = processes.run(2, learn_in_two_ways)[0]
    # While the 16 centroids are filled, what is left over is not used; later each sample counts once.
    unpruned, pruned = N + 8, 7 + 5
    assert state["counts"].sum() == 16 + 4 * unpruned + 3 * pruned


# ------------------------------------------------------------------------------------------------ uneven batches


def uneven(rank: int, joined: bool, size: int, blocker_first: bool = False) -> dict[str, Any]:
    model = small_net()
    ddp = DDP(model)
    blocker = ForwardBlocker(ddp, at="0", prune_ratio=0.4, selector=selector(), timeout=5)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
    joinables = [blocker, ddp] if blocker_first else [ddp, blocker]
    with Join(joinables) if joined else contextlib.nullcontext():
        for step in range(4 + 2 * rank):
            x, y = blocker(*batch(rank, step))
            F.cross_entropy(ddp(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    for step in range(10, 12):  # and on as usual
        x, y = blocker(*batch(rank, step))
        F.cross_entropy(ddp(x), y).backward()
    assert_same_everywhere(blocker.selector.state_dict())
    assert blocker.stats.steps_replayed == 4 + 2 * rank + 2
    assert blocker.stats.steps == 4 + 2 * (size - 1) + 2
    return {
        "weights": [p.detach() for p in model.parameters()],
        "counts": blocker.selector.state_dict()["counts"],
        "seen": (blocker.stats.steps_replayed, blocker.stats.recompute_reasons),
    }


@pytest.mark.parametrize("blocker_first", [False, True])
def test_ranks_with_fewer_batches_join(blocker_first: bool, feature) -> None:
    found = processes.run(3, uneven, True, 3, blocker_first)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0]["weights"], other["weights"], strict=True))
    # The first step of three ranks fills 16 centroids, the others count every retained sample.
    assert found[0]["counts"].sum() == 16 + 7 * (4 + 6 + 8 - 3 + 2 * 3)
    feature(GROUP, "DDP, uneven batches, Join", found[0]["seen"])


def test_uneven_batches_without_join_are_an_error_that_names_it() -> None:
    _, errors = processes.outcomes(2, uneven, False, 2, timeout=60)
    assert "Join([ddp, blocker])" in errors[1]
    assert "rank 0 of 2" in errors[1]


# ------------------------------------------------------------------------------------ communication in the model


class SyncedNorm(nn.Module):
    """What SyncBatchNorm does; PyTorch's own refuses to run on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        import torch.distributed.nn.functional as DF

        mean = DF.all_reduce(x.mean((0, 2, 3), keepdim=True)) / dist.get_world_size()
        return x - mean


def train_synced(rank: int) -> tuple[int, dict[str, int]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3), SyncedNorm()), nn.Flatten(), nn.Linear(8 * 36, CLASSES))
    ddp = DDP(model)
    blocker = ForwardBlocker(ddp, at="0", prune_ratio=0.4, selector=selector())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            x, y = blocker(*batch(rank, step))
            F.cross_entropy(ddp(x), y).backward()
            assert_same_everywhere(blocker.selector.state_dict())
    assert blocker.stats.steps_recomputed == 4
    assert any("communicates between processes" in reason for reason in blocker.stats.recompute_reasons)
    assert sum("computes the shallow layers twice" in str(w.message) for w in caught) == 1
    return blocker.stats.steps_replayed, blocker.stats.recompute_reasons


def test_a_shallow_part_that_communicates_is_recomputed_and_that_is_said_once(feature) -> None:
    feature(GROUP, "SyncBatchNorm before the cut (a stand-in)", processes.run(2, train_synced)[0])


class Centre(nn.Module):
    """A buffer that each rank moves by itself, until DDP makes it that of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        self.centre.lerp_(x.detach().mean((0, 2, 3)).view(8, 1, 1), 0.5)
        return x - self.centre


def train_centred(rank: int) -> tuple[int, dict[str, int]]:
    torch.manual_seed(0)
    shallow = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Centre(), nn.Conv2d(8, 8, 3))
    ddp = DDP(nn.Sequential(shallow, nn.Flatten(), nn.Linear(8 * 16, CLASSES)))
    blocker = ForwardBlocker(ddp, at="0", prune_ratio=0.4, selector=selector())
    warnings.simplefilter("ignore")
    for step in range(3):
        x, y = blocker(*batch(rank, step))
        F.cross_entropy(ddp(x), y).backward()
    return blocker.stats.steps_replayed, blocker.stats.recompute_reasons


def test_buffers_that_ddp_exchanges_in_between_are_not_replayed(feature) -> None:
    for replayed, reasons in processes.run(2, train_centred):
        assert replayed == 0
        assert ["writes buffers of its own" in reason for reason in reasons] == [True]
    feature(GROUP, "DDP, buffers other than BatchNorm's written before the cut", (replayed, reasons))


# -------------------------------------------------------------------------------------------- running statistics


def _running_statistics(rank: int) -> tuple[list[Tensor], list[Tensor], int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, CLASSES))
    plain = copy.deepcopy(model)
    ddp, plain_ddp = DDP(model), DDP(plain)
    blocker = ForwardBlocker(ddp, "1", 0.5, selector=selector(), reuse="replay")
    for step in range(3):  # the weights stay: only the statistics move
        x, _ = batch(rank, step)
        ddp(blocker(x)).sum().backward()
        plain_ddp(x).sum().backward()
    return list(model[1].buffers()), list(plain[1].buffers()), blocker.stats.steps_replayed


def test_running_statistics_go_on_from_those_of_the_first_rank_as_ddp_has_it() -> None:
    """DDP hands them over before each forward, after the probe."""
    ranks = processes.run(2, _running_statistics)
    for found, expected, replayed in ranks:
        assert replayed == 3
        torch.testing.assert_close(found, expected)
    assert not torch.equal(ranks[0][0][0], ranks[1][0][0])


def _frozen(rank: int) -> tuple[dict[str, int], int, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, CLASSES))
    ddp = DDP(model.train())
    model[1].eval()
    blocker = ForwardBlocker(ddp, "2", 0.5, selector=selector())
    for step in range(3):
        x, y = blocker(*batch(rank, step))
        F.cross_entropy(ddp(x), y).backward()
    return blocker.stats.recompute_reasons, blocker.stats.steps_replayed, list(model[1].buffers())


def test_a_frozen_batch_norm_before_the_cut_is_replayed(feature: Any) -> None:
    """It reads its running statistics and writes nothing that ranks could exchange."""
    for reasons, replayed, buffers in processes.run(2, _frozen):
        assert (reasons, replayed) == ({}, 3)
        assert torch.equal(buffers[0], torch.zeros(8))
    feature(GROUP, "DDP, frozen BatchNorm before the cut", (3, {}))
