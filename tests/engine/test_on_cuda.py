"""What a CUDA device would run is known and can be replayed, as far as that shows without one.

`make cuda-matrix` runs all of it, and writes what was seen into docs/compatibility.md.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("torchvision")
pytest.importorskip("timm")

from halfway.engine import batch_norm, ops
from halfway.engine.plan import Op, RowLayout
from tests.helpers.on_cuda import (
    KERNELS,
    MODELS,
    SAMPLES,
    SETTINGS,
    Device,
    Model,
    Operation,
    Setting,
    attention,
    needs_cuda_build,
    operations,
    replayed,
)

aten = torch.ops.aten
WHAT_TO_DO = (
    "engine/ops.py does not know these operations, which cost more than FLOPS or BYTES of tests/helpers/on_cuda.py per "
    "sample. Decide: _EXPENSIVE, if computing it again costs more than copying the retained part of its output; "
    "_CHEAP, if it moves about as many bytes. Then run `make cuda-matrix`"
)


def as_parameter(model: Model, setting: Setting) -> Any:
    quick = model.sample and setting.name in ("float32", "float16")
    return pytest.param(model, setting, id=f"{model.name}-{setting.name}", marks=[] if quick else [pytest.mark.slow])


def unknown(seen: list[Operation]) -> dict[str, str]:
    return {o.name: f"{o.flops:,.0f} FLOPs, {o.bytes:,.0f} bytes" for o in seen if not o.known}


@needs_cuda_build
@pytest.mark.parametrize(("model", "setting"), [as_parameter(m, s) for m in MODELS for s in SETTINGS])
def test_every_operation_that_costs_something_is_known(model: Model, setting: Setting, cuda_operation: Any) -> None:
    net = model.build()
    with Device() as device:
        device.move(net, setting)
        x = device.empty(SAMPLES, 3, model.size, model.size, setting=setting)
        seen = operations(lambda: net(x))
    assert unknown(seen) == {}, WHAT_TO_DO
    cuda_operation(model.name, seen)


@needs_cuda_build
@pytest.mark.parametrize("setting", SETTINGS, ids=[s.name for s in SETTINGS])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_of_fused_attention_is_known(kernel: str, setting: Setting, cuda_operation: Any) -> None:
    with Device() as device:
        heads = [device.empty(SAMPLES, 6, 197, 64, setting=setting).requires_grad_() for _ in range(3)]
        seen = operations(lambda: attention(kernel)(*heads))
    assert unknown(seen) == {}, WHAT_TO_DO
    assert "expensive" in {ops.traits(o.func).kind for o in seen}
    cuda_operation(f"SDPA ({kernel})", seen)


def test_an_operation_that_is_in_no_list_is_unknown() -> None:
    assert not Operation(aten._cdist_forward.default, 1e6, 0).known
    assert not Operation(aten._cdist_forward.default, 0, 1e6).known
    assert Operation(aten._cdist_forward.default, 10, 10).known
    assert Operation(aten.relu_.default, 0, 1e9).known
    assert Operation(aten.transpose.int, 0, 1e9).known


# ------------------------------------------------------------------------------- the same operations in a replay


class Attending(nn.Module):
    """Attention by one kernel, between two products."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.attend = attention(kernel)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(2, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(*heads).transpose(1, 2).flatten(2))


class Images(nn.Sequential):
    """BatchNorm that trains and one that does not, in place and pooled."""

    def __init__(self) -> None:
        frozen = nn.BatchNorm2d(8).eval()
        frozen.train = lambda mode=True: frozen  # type: ignore[method-assign, misc, assignment, return-value]
        super().__init__(
            *(nn.Conv2d(3, 8, 3, bias=False), frozen, nn.ReLU(True), nn.Conv2d(8, 8, 3, bias=False)),
            *(
                nn.BatchNorm2d(8),
                nn.ReLU(True),
                nn.MaxPool2d(2),
                nn.Conv2d(8, 8, 3),
                nn.BatchNorm2d(8),
                nn.Dropout(0.1),
            ),
        )


@needs_cuda_build
@pytest.mark.parametrize("setting", SETTINGS, ids=[s.name for s in SETTINGS])
@pytest.mark.parametrize("kernel", KERNELS)
def test_fused_attention_is_answered_from_the_tape(kernel: str, setting: Setting) -> None:
    """Beside its output it returns a log-sum-exp, which has the sample axis, and a random state, which has none."""
    net = Attending(kernel).train()
    with Device() as device:
        device.move(net, setting)
        x = device.empty(SAMPLES, 40, 64, setting=setting)
        passed = replayed(net, x, torch.arange(0, 60, 2, device="cuda"))
    assert passed.computed == 0
    assert passed.replayed == (3 if kernel != "math" else 5)


@needs_cuda_build
@pytest.mark.parametrize("setting", SETTINGS, ids=[s.name for s in SETTINGS])
def test_a_replay_runs_the_operations_of_the_probe_also_where_that_used_cudnn(setting: Setting) -> None:
    net = Images().train()
    with Device() as device:
        device.move(net, setting)
        x = device.empty(SAMPLES, 3, 16, 16, setting=setting)
        used_cudnn = aten.cudnn_batch_norm.default in [o.func for o in operations(lambda: net(x))]
        passed = replayed(net, x, torch.arange(0, 60, 2, device="cuda"))
    assert used_cudnn == (setting.dtype == torch.float32)
    assert (passed.replayed, passed.computed) == (4, 0)


@needs_cuda_build
def test_no_batch_norm_of_cudnn_is_left_in_a_replay() -> None:
    with Device() as device:
        x, w = device.empty(SAMPLES, 3, 8, 8), device.empty(3)
        mode = batch_norm.WithoutCudnn(lambda: aten.cudnn_batch_norm.default)
        for norm in (
            lambda: F.batch_norm(x, w, w, w, bias=w, training=True),
            lambda: torch.batch_norm(x, w, w, w, w, True, 0.1, 1e-5, True),
        ):
            with mode:
                seen = [o.func for o in operations(norm) if o.func.namespace == "aten"]
            assert seen == [aten.native_batch_norm.default]


def test_pytorchs_own_batch_norm_is_given_the_same() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 4, 4)
    kept = [torch.randn(3), torch.rand(3)]
    moved = [t.clone() for t in kept]
    weight, bias = torch.randn(3), torch.randn(3)
    expected = F.batch_norm(x, *kept, weight, bias=bias, training=True, momentum=0.3, eps=0.1)
    with batch_norm.WithoutCudnn(lambda: aten.cudnn_batch_norm.default):
        found = F.batch_norm(x, *moved, weight, bias=bias, training=True, momentum=0.3, eps=0.1)
    assert torch.equal(found, expected)
    assert all(map(torch.equal, moved, kept))


def test_a_log_sum_exp_that_is_filled_up_with_infinity_is_recognised() -> None:
    """As CUDA's memory-efficient kernel does: 5 tokens become 8. Its random state stays as it is."""
    torch.manual_seed(0)
    rows = torch.tensor([0, 2, 5])
    whole = [torch.randn(6, 2, 5, 4), F.pad(torch.randn(6, 2, 5), (0, 3), value=torch.inf), torch.tensor(7)]
    op = Op(aten._scaled_dot_product_efficient_attention.default, "", options=[[RowLayout(0)], [RowLayout(0)], []])
    part = [whole[0][rows], whole[1][rows], torch.tensor(9)]
    assert op.prove(whole, part, (), rows, 6, rehearsed=True) == ""
    assert op.proven
    assert op.samples == (RowLayout(0), RowLayout(0), None)


def test_infinities_that_do_not_agree_are_seen() -> None:
    torch.manual_seed(0)
    rows, whole = torch.tensor([0, 2, 5]), torch.randn(6, 8)
    whole[2, 3] = torch.inf
    part = whole[rows].clone()
    part[1, 3] = -torch.inf
    op = Op(aten.mm.default, "", options=[[RowLayout(0)]])
    op.prove([whole], [part], (), rows, 6, rehearsed=True)
    assert not op.proven
