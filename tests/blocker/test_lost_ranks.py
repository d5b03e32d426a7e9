"""Ranks in trouble: a bad batch, other settings, one that stops or never begins; all of them are told."""

from __future__ import annotations

import copy
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from halfway import ForwardBlocker
from tests.helpers import processes
from tests.helpers.ranks import (
    batch,
    selector,
    small_net,
)


def one_rank_is_poisoned(rank: int) -> str:
    model = small_net()
    blocker = ForwardBlocker(DDP(model), at="0", prune_ratio=0.4, selector=selector())
    for step in range(3):
        blocker(batch(rank, step)[0])
    before = copy.deepcopy(blocker.selector.state_dict())
    x = batch(rank, 9)[0]
    if rank == 1:
        x[3] = float("nan")
    blocker(x)
    with pytest.raises(FloatingPointError) as caught:
        blocker.set_epoch(1)
    after = blocker.selector.state_dict()
    assert torch.equal(before["centroids"], after["centroids"])
    assert torch.equal(before["counts"], after["counts"])
    return str(caught.value)


def test_a_bad_batch_on_one_rank_teaches_nobody_and_is_an_error_on_all() -> None:
    assert all("not finite" in message for message in processes.run(2, one_rank_is_poisoned))


def other_settings(rank: int) -> str:
    with pytest.raises(ValueError, match="different configurations") as caught:
        ForwardBlocker(small_net(), at="0", prune_ratio=0.4 if rank else 0.3, selector=selector())
    return str(caught.value)


def test_ranks_that_disagree_say_so_at_construction_on_all_of_them() -> None:
    for message in processes.run(2, other_settings):
        assert "prune_ratio: 0.3 on rank 0, 0.4 on rank 1" in message


def wait_for_the_others(rank: int) -> None:
    """Until all have come here: a process that is silent but alive."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"here-{rank}", "")
    store.wait([f"here-{other}" for other in range(dist.get_world_size())], timedelta(seconds=100))


def stops_early(rank: int, missing: int) -> tuple[str, float]:
    blocker = ForwardBlocker(small_net(), at="0", prune_ratio=0.4, selector=selector(), timeout=4)
    for step in range(3):
        blocker(batch(rank, step)[0])
    if rank == missing:
        wait_for_the_others(rank)
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="did not call the blocker") as caught:
        blocker(batch(rank, 3)[0])
    seconds = time.monotonic() - start
    wait_for_the_others(rank)
    return str(caught.value), seconds


def test_a_rank_that_stops_calling_is_named_within_the_time_out() -> None:
    found = processes.run(3, stops_early, 1)
    for rank in (0, 2):
        message, seconds = found[rank]
        assert "rank 1 of 3 did not call the blocker (call 4) within 4 s" in message
        assert "Join([ddp, blocker])" in message
        assert seconds < 30


def never_makes_one(rank: int) -> str:
    if rank == 1:
        wait_for_the_others(rank)
        return ""
    with pytest.raises(RuntimeError, match="did not make a ForwardBlocker") as caught:
        ForwardBlocker(small_net(), at="0", prune_ratio=0.4, selector=selector(), timeout=3)
    wait_for_the_others(rank)
    return str(caught.value)


def test_a_rank_that_never_makes_a_blocker_is_named() -> None:
    assert "rank 1 of 2" in processes.run(2, never_makes_one)[0]
