"""What kind of operation is this? The one place that knows operations by name.

Five kinds matter to recording and replaying a forward pass:

- expensive: convolutions, matrix products, attention, max pooling, softmax, GELU. Worth recording: computing them
  again costs more than copying the retained part of their output.
- batch_norm: training-mode BatchNorm, the one common operation in which samples of a batch see each other.
- random: draws random numbers (dropout, drop path). Must be drawn once, not twice.
- host: hands a value of a tensor to Python, which may branch on it.
- cheap: everything else.

Beside its kind, an operation may write to its arguments, and may rule out a replay altogether.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import torch

aten = torch.ops.aten

Kind = Literal["cheap", "expensive", "batch_norm", "random", "host"]

_EXPENSIVE = (
    *("convolution", "_convolution", "convolution_overrideable", "cudnn_convolution", "miopen_convolution"),
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "linear"),
    *("_addmm_activation", "_scaled_mm", "_grouped_mm"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math_for_mps"),
    *("_flash_attention_forward", "_efficient_attention_forward"),
    *("_softmax", "gelu"),
    *("max_pool2d_with_indices", "max_pool3d_with_indices", "mkldnn_max_pool2d"),
)
_BATCH_NORM = (
    *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
    *("_native_batch_norm_legit", "_batch_norm_with_update"),
)
_RECURRENT = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")
_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")


def _overloads(names: tuple[str, ...]) -> frozenset[Any]:
    packets = (getattr(aten, name, None) for name in names)
    return frozenset(packet.default for packet in packets if packet is not None)


EXPENSIVE = _overloads(_EXPENSIVE)
BATCH_NORM = _overloads(_BATCH_NORM)
RECURRENT = _overloads(_RECURRENT)


class Traits(NamedTuple):
    """kind: see above. written: positions and names of the arguments it writes to.
    refusal: why a pass with this operation cannot be replayed; empty if it can."""

    kind: Kind
    written: tuple[int | str, ...] = ()
    refusal: str = ""


CHEAP = Traits("cheap")


@functools.cache
def traits(func: Any) -> Traits:
    """The traits of an operation as a dispatch mode sees it (an OpOverload or a higher-order operator)."""
    if not isinstance(func, torch._ops.OpOverload):
        return CHEAP
    return Traits(_kind(func), _written(func), _refusal(func))


def _kind(func: torch._ops.OpOverload) -> Kind:
    if func in EXPENSIVE:
        return "expensive"
    if func in BATCH_NORM:
        return "batch_norm"
    if torch.Tag.nondeterministic_seeded in func.tags:
        return "random"
    returns = func._schema.returns
    if torch.Tag.data_dependent_output in func.tags and not any("Tensor" in str(r.type) for r in returns):
        return "host"
    return "cheap"


def _written(func: torch._ops.OpOverload) -> tuple[int | str, ...]:
    arguments = func._schema.arguments
    written: list[int | str] = []
    for position, argument in enumerate(arguments):
        # native_batch_norm and its kin do not admit in their schema that they move the running statistics.
        moved = func in BATCH_NORM and argument.name in ("running_mean", "running_var")
        if moved or (argument.alias_info is not None and argument.alias_info.is_write):
            written.append(argument.name if argument.kwarg_only else position)
    return tuple(written)


def _refusal(func: torch._ops.OpOverload) -> str:
    if func.namespace in _COLLECTIVE_NAMESPACES:
        return f"the shallow part communicates between processes ({func}), as SyncBatchNorm does"
    if func in RECURRENT:
        return f"the shallow part uses a fused recurrent kernel ({func})"
    if func is aten.randperm.default or func is aten.randperm.generator:
        return "the shallow part shuffles (torch.randperm)"
    if torch.Tag.dynamic_output_shape in func.tags:
        return f"the shallow part has an operation whose output shape depends on the data ({func})"
    return ""


def excused(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a refused operation is harmless in this call: x[indices] has a known shape, only x[mask] has not."""
    if func is not aten.index.Tensor:
        return False
    return not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def argument(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value an argument has in this call, its default included; None if there is no such argument."""
    if name in kwargs:
        return kwargs[name]
    for position, declared in enumerate(func._schema.arguments):
        if declared.name == name:
            return args[position] if position < len(args) else declared.default_value
    return None
