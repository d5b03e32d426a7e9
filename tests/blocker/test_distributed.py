"""Several processes, for real: DDP, FSDP2, uneven batches, lost ranks."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from halfway import Density, ForwardBlocker, Schedule

from ..helpers import processes

N, CLASSES = 12, 5
GROUP = "distributed"


def small_net(seed: int = 0) -> nn.Module:
    """A shallow part without BatchNorm, so that retained samples alone give the same gradients; a deep part with."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1)),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(8 * 9, CLASSES),
    )


def batch(rank: int, step: int, size: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(size, 3, 8, 8, generator=generator)
    return x, torch.randint(0, CLASSES, (size,), generator=generator)


def selector() -> Density:
    return Density(num_centroids=16)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def averaged(tensors: list[Tensor]) -> list[Tensor]:
    for t in tensors:
        dist.all_reduce(t)
        t /= dist.get_world_size()
    return tensors


def assert_same_everywhere(state: dict[str, Any]) -> None:
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    for other in states:
        assert all(torch.equal(torch.as_tensor(state[k]), torch.as_tensor(other[k])) for k in state)


# ------------------------------------------------------------------------- DDP


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


# ---------------------------------------------------------------------- trouble


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


# --------------------------------------------------------------- uneven batches


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


# ----------------------------------------------------- communication in the model


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


# ------------------------------------------------------------------------ FSDP2


def train_sharded(rank: int, sharded: bool, mixed: bool) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(4)]
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), *layers, nn.Flatten(), nn.Linear(16 * 6, CLASSES))
    wrapped: nn.Module = model
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
        for layer in model[1:5]:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    else:
        wrapped = DDP(model)
    blocker = ForwardBlocker(wrapped, at="2", prune_ratio=0.4, selector=selector())
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-3, fused=True)
    chosen, losses = [], []
    for step in range(5):
        generator = torch.Generator().manual_seed(100 * rank + step)
        x = torch.randn(N, 6, 8, generator=generator)
        y = torch.randint(0, CLASSES, (N,), generator=generator)
        x, y = blocker(x, y)
        assert blocker.last is not None
        chosen.append(blocker.last.indices.tolist())
        loss = F.cross_entropy(wrapped(x).float(), y)
        loss.backward()
        losses.append(loss.item())
        full = [p.grad.full_tensor() if sharded else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    stats = blocker.stats
    return {
        "chosen": chosen,
        "losses": losses,
        "gradients": full,
        "replayed": stats.steps_replayed,
        "reasons": stats.recompute_reasons,
    }


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="FSDP2 over gloo gives other gradients than DDP in torch 2.8, also without halfway",
)
def test_fsdp2_chooses_and_trains_like_ddp(feature) -> None:
    plain = processes.run(2, train_sharded, False, False)
    sharded = processes.run(2, train_sharded, True, False)
    for one, other in zip(plain, sharded, strict=True):
        assert one["chosen"] == other["chosen"]
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-4)
        for a, b in zip(one["gradients"], other["gradients"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
        assert list(other["reasons"].values()) == [5]
    feature(GROUP, "FSDP2, 2 processes, fused optimizer", (sharded[0]["replayed"], sharded[0]["reasons"]))


def test_fsdp2_with_mixed_precision_trains_like_ddp_up_to_rounding(feature) -> None:
    plain = processes.run(2, train_sharded, False, False)
    mixed = processes.run(2, train_sharded, True, True)
    for one, other in zip(plain, mixed, strict=True):
        assert other["losses"][0] == pytest.approx(one["losses"][0], rel=0.05)
        assert all(torch.isfinite(g).all() for g in other["gradients"])
        assert list(other["reasons"].values()) == [5]
    feature(GROUP, "FSDP2 with a mixed-precision policy", (mixed[0]["replayed"], mixed[0]["reasons"]))


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
