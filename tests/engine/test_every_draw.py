"""Every operation of this torch version that draws random numbers, called before the cut.

The list is torch's own: all overloads that are tagged as seeded. Arguments are made from the schema. In a replayed step
what such a call returns, and what it writes to its arguments, is that of the probe cut to the retained samples; or the
step is recomputed, with a reason. An operation that is new and needs other arguments fails here, until it is listed.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfway
from tests.helpers.apart import TOLERANCE, error, gradients, indexed

aten = torch.ops.aten
WIDTH = 5

_OTHER_DEVICES = {
    "only on CUDA": (
        *("_cudnn_rnn.out", "_cudnn_rnn.default", "_cudnn_init_dropout_state.default", "_cudnn_init_dropout_state.out"),
        *("_cudnn_attention_backward.default", "_cudnn_attention_forward.default"),
        "_cudnn_attention_forward_no_dropout_inplace.default",
        *("_scaled_dot_product_cudnn_attention.default", "_scaled_dot_product_cudnn_attention_backward.default"),
        *("_efficient_attention_forward.default", "_scaled_dot_product_efficient_attention.default"),
        "_scaled_dot_product_efficient_attention_backward.default",
        *("_flash_attention_forward.default", "_flash_attention_forward.quantized"),
        "_flash_attention_forward_no_dropout_inplace.default",
        *("_scaled_dot_product_flash_attention.default", "_scaled_dot_product_flash_attention.quantized"),
        *("_triton_scaled_dot_attention.default", "_triton_scaled_dot_attention.out"),
        *("_fill_mem_eff_dropout_mask_.default", "_fused_dropout.default", "_fused_dropout.out"),
    ),
    "only on ROCm": ("miopen_rnn.default", "miopen_rnn.out"),
    "only on MPS": ("_lstm_mps.default", "_lstm_mps.out", "_scaled_dot_product_attention_math_for_mps.default"),
    "only on devices that bring it": ("_scaled_dot_product_fused_attention_overrideable.default",),
    "only for nested tensors": ("_nested_tensor_softmax_with_shape.default",),
}
NOT_HERE = {name: reason for reason, names in _OTHER_DEVICES.items() for name in names}
# Shuffled samples, fused kernels, and packed sequences, in which a sample has no place of its own.
RECOMPUTED = ("randperm.", "lstm.", "gru.data", "rnn_relu.data", "rnn_tanh.data")


def seeded() -> list[str]:
    """The names of all tagged overloads. (`dir(torch.ops.aten)` only has those that somebody has used.)"""
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        packet = getattr(aten, name, None) if namespace == "aten" else None
        func = getattr(packet, schema.overload_name or "default", None)
        if func is not None and torch.Tag.nondeterministic_seeded in func.tags:
            found.add(f"{name}.{schema.overload_name or 'default'}")
    return sorted(found)


# --- arguments, from the schema --------------------------------------------------------------------------------------


def attention(h: Tensor) -> list[Any]:
    """Queries, keys and values (B, 1, WIDTH, 1), and a share of dropout where the operation takes one next."""
    return [h.view(-1, 1, WIDTH, 1)] * 3


def recurrent(h: Tensor, states: int, gates: int, packed: bool) -> list[Any]:
    """Of a recurrent layer with 3 hidden features and dropout between two layers."""
    n = len(h)
    weights = [torch.ones(3 * gates, size) / 9 for size in (1, 3, 3, 3)]
    x = h.unsqueeze(2).transpose(0, 1).reshape(-1, 1) if packed else h.unsqueeze(2)
    batch_sizes = [torch.full((WIDTH,), n)] if packed else []
    hx = [torch.zeros(2, n, 3)] * states
    rest = [False, 2, 0.5, True, False]
    return [x, *batch_sizes, hx if states == 2 else hx[0], weights, *rest, *([] if packed else [True])]


def special(name: str, h: Tensor) -> list[Any] | None:
    """The positional arguments of those that the rules below do not fit."""
    packet, _, overload = name.partition(".")
    if packet in ("lstm", "gru", "rnn_relu", "rnn_tanh"):
        gates = {"lstm": 4, "gru": 3}.get(packet, 1)
        return recurrent(h, 2 if packet == "lstm" else 1, gates, packed=overload == "data")
    if "scaled_dot_product" in packet or packet == "_fused_sdp_choice":
        masked = packet.endswith("for_cpu")
        return [*attention(h), *([] if masked else [None]), 0.0 if masked else 0.4]
    if packet == "binomial":
        return [torch.full_like(h, 7.0), h]
    if packet.startswith("feature_"):
        return [h.unsqueeze(2).repeat(1, 1, 3), 0.4, True]
    if packet == "multinomial":
        return [h, 2]
    if packet == "_sample_dirichlet":
        return [h + 0.5]
    return None


def arguments(func: Any, h: Tensor) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for a call on a batch: `h` (B, WIDTH), within (0, 1)."""
    name = f"{func._schema.name.removeprefix('aten::')}.{func._overloadname}"
    args, kwargs = special(name, h), {}
    made = len(args) if args is not None else 0
    args = args or []
    for position, argument in enumerate(func._schema.arguments):
        if position < made:
            continue
        value = _value(name, argument, h)
        if not argument.kwarg_only:
            args.append(argument.default_value if value is _DEFAULT else value)
        elif value is not _DEFAULT:
            kwargs[argument.name] = value
    return args, kwargs


_DEFAULT = object()
_NUMBERS = {"p": 0.4, "high": 9, "to": 9, "low": 2, "from": 2, "std": 0.5, "mean": 0.5, "train": True, "training": True}


def _value(name: str, argument: Any, h: Tensor) -> Any:
    kind = str(argument.type)
    written = argument.alias_info is not None and argument.alias_info.is_write
    if argument.kwarg_only and written:
        integers = name.startswith(("randint.", "randperm.", "multinomial."))
        shape = (len(h),) if name.startswith("randperm.") else (len(h), 2) if "multinomial" in name else h.shape
        mask = name == "native_dropout.out" and argument.name == "out1"
        return torch.full(shape, 77, dtype=torch.bool if mask else torch.int64 if integers else h.dtype)
    if argument.name == "noise":
        return torch.full_like(h, 77.0)
    if kind == "Tensor":
        if argument.name == "high":
            return torch.tensor(9)
        return h.clone()
    if argument.name == "size":
        return list(h.shape)
    if argument.name == "n":
        return len(h)
    if argument.name == "generator" and not argument.has_default_value():
        return None
    if argument.name in _NUMBERS and kind in ("float", "int", "SymInt", "bool", "Scalar", "number", "Optional[int]"):
        return _NUMBERS[argument.name]
    if argument.name == "train" and kind == "Optional[bool]":
        return True
    if argument.has_default_value():
        return _DEFAULT
    raise NotImplementedError(f"{name} has an argument {argument.name} of type {kind}: teach this test to make one")


# --- one step --------------------------------------------------------------------------------------------------------


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


class Drawing(nn.Module):
    """Calls one operation before the cut; what it gave and what it wrote goes to `seen`, outside of the model."""

    def __init__(self, func: Any, seen: list[tuple[nn.Module, list[Tensor]]]) -> None:
        super().__init__()
        self.a, self.b, self.cut, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 4), nn.Identity(), nn.Linear(4, 3)
        self.call = lambda: (func, seen)

    def forward(self, x: Tensor) -> Tensor:
        func, seen = self.call()
        h = self.a(x)
        args, kwargs = arguments(func, h.detach().sigmoid().clamp(0.1, 0.9))
        out = func(*args, **kwargs)
        results = [*tensors(out), *written(func, args, kwargs)]
        seen.append((self, [t.detach().clone() for t in results]))
        # Of each sample, if there is such a dimension: outputs of a recurrent layer come packed, with time first.
        usable = [t for t in results if t.shape[:1] == x.shape[:1] and t.dim() > 1]
        drawn = sum(t.detach().float().flatten(1).mean(1, keepdim=True).clamp(-9, 9) for t in usable)
        return self.head(self.cut(self.b(h + drawn)))


def written(func: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that the schema says are written to."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors(kwargs[argument.name] if argument.kwarg_only else args[position])
    return found


def assert_cut(full: list[Tensor], part: list[Tensor], rows: Tensor, size: int) -> None:
    assert len(full) == len(part)
    for whole, some in zip(full, part, strict=True):
        changed = [d for d in range(whole.dim()) if whole.shape[d] != some.shape[d]]
        assert len(changed) <= 1
        expected = whole
        if changed:
            dim = changed[0]
            groups = whole.shape[dim] // size  # time first, in one dimension
            expected = whole.unflatten(dim, (groups, size)).index_select(dim + 1, rows).flatten(dim, dim + 1)
        torch.testing.assert_close(some, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", seeded())
def test_a_draw_is_replayed_for_the_retained_samples_or_recomputed(name):
    if name in NOT_HERE:
        pytest.skip(NOT_HERE[name])
    packet, _, overload = name.partition(".")
    func = getattr(getattr(aten, packet), overload)
    size, seen = 32, []
    model = Drawing(func, seen)
    blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=halfway.Density(num_centroids=4))
    replayed = 0
    for step in range(3):
        x = torch.randn(size, 6, generator=torch.Generator().manual_seed(step))
        plain = copy.deepcopy(model)
        seen.clear()
        before = torch.get_rng_state()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="halfway")
            retained = blocker(x)
            after = torch.get_rng_state()
            found = gradients(model, retained)
        mine, end = [results for owner, results in seen if owner is model], torch.get_rng_state()
        stats, rows = blocker.stats, blocker.last.indices
        seen.clear()
        if stats.steps_replayed > replayed:
            replayed += 1
            torch.set_rng_state(before)
            with indexed(plain, "cut", rows):
                expected = gradients(plain, x)
            assert_cut(seen[0][1], mine[-1], rows, size)
        else:
            assert all(stats.recompute_reasons)
            torch.set_rng_state(after)
            expected = gradients(plain, x[rows])
            for found_, expected_ in zip(mine[-1], seen[0][1], strict=True):
                torch.testing.assert_close(found_, expected_)
        assert error(found, expected) <= TOLERANCE
        assert torch.equal(end, torch.get_rng_state())
    assert stats.steps_replayed + stats.steps_recomputed == 3
    if not name.startswith(RECOMPUTED):
        assert stats.steps_replayed == 3, stats.recompute_reasons


def test_the_list_of_operations_for_other_devices_has_no_strangers():
    """Each is a seeded operation of some version, and none of them runs here after all."""
    torch.manual_seed(0)
    h = torch.rand(8, WIDTH).clamp(0.1, 0.9)
    runs = []
    for name in set(seeded()) & set(NOT_HERE):
        packet, _, overload = name.partition(".")
        func = getattr(getattr(aten, packet), overload)
        try:
            args, kwargs = arguments(func, h)
            func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
            continue
        runs.append(name)
    assert not runs
