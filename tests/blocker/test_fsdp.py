"""FSDP2 on two processes: chooses and trains like DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from halfway import ForwardBlocker
from tests.helpers import processes
from tests.helpers.ranks import (
    CLASSES,
    GROUP,
    N,
    selector,
)


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
