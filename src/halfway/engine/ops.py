"""What kind of operation is this? The one place that knows operations by name.

Five kinds matter to recording and replaying a forward pass:

- expensive: convolutions, matrix products, attention, max pooling, softmax, GELU. Worth recording: computing them
  again costs more than copying the retained part of their output.
- batch_norm: training-mode BatchNorm, the one common operation in which samples of a batch see each other.
- random: draws random numbers (dropout, drop path). Must be drawn once, not twice.
- host: hands a value of a tensor to Python, which may branch on it.
- cheap: everything else.

Beside its kind, an operation may write to its arguments, may rule out a replay altogether, and does something to the
sample axis (see `axis`): its schema says which arguments name an axis, and whether it is one of ours at all.
"""

from __future__ import annotations

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
    *("_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward"),
    *("_softmax", "_safe_softmax", "gelu"),
    *("max_pool2d_with_indices", "max_pool3d_with_indices", "mkldnn_max_pool2d"),
)
_BATCH_NORM = (
    *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
    *("_native_batch_norm_legit", "_batch_norm_with_update"),
)
# Cheap after a look at each, not for want of a list: it reads its input about once and writes its output once, as
# cutting a recording would. (Whatever works element by element, or only looks at its input in another way, is cheap by
# its tags and its schema.)
_CHEAP = (
    *("native_layer_norm", "native_group_norm", "_fused_rms_norm", "linalg_vector_norm", "hardswish", "glu"),
    *("mean", "sum", "var_mean", "amax", "avg_pool2d", "_adaptive_avg_pool2d"),
    *("copy", "roll", "repeat", "constant_pad_nd", "index"),
    *("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"),
)
_RECURRENT = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")
# Operations whose outputs depend on the shapes of their inputs, not on values; EMPTY ones are not even set.
_VALUE_FREE = (
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like", "ones_like"),
    *("full_like", "rand_like", "randn_like", "randint_like", "zeros", "ones", "full", "scalar_tensor"),
)
_EMPTY = ("empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "empty_permuted")
# Operations that hand on what they get, and run or not depending on memory layouts and on autocast's cache.
_TRANSPARENT = ("_to_copy", "detach", "alias", "clone")
_RESHAPING = ("_unsafe_view", "_reshape_alias", "reshape")
# Numbers to compute with; those of an arange only say how many.
_NUMBERS = ("Tensor", "number", "float", "complex")
_COUNTING = ("arange",)
# They take a `dim` only to put things side by side or apart; that shows in the shapes.
_STRUCTURAL = ("cat", "stack", "unbind_copy", "split_copy", "split_with_sizes_copy", "select_copy", "slice_copy")
# They go through the batch in order, or keep the axis they name and reduce over the others.
_MIXING = ("renorm", "renorm_", "masked_scatter", "masked_scatter_")
# Draws that compute with what they write to; all others fill it.
_DRAWS_FROM_WRITTEN = ("rrelu_with_noise_", "rrelu_")
_REDIRECTING = ("set_", "resize_", "resize_as_")
# Who else but PyTorch is known to treat samples apart.
_KNOWN_NAMESPACES = ("aten", "prims", "torchvision")
_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")


def _overloads(names: tuple[str, ...]) -> frozenset[Any]:
    packets = (getattr(aten, name, None) for name in names)
    return frozenset(
        getattr(packet, overload)
        for packet in packets
        if packet is not None
        for overload in packet.overloads()
        if not overload.endswith("out")
    )


EXPENSIVE = _overloads(_EXPENSIVE)
BATCH_NORM = _overloads(_BATCH_NORM)
RECURRENT = _overloads(_RECURRENT)


class Traits(NamedTuple):
    """kind: see above.
    written: positions and names of the arguments it writes to.
    refusal: why a pass with this operation cannot be replayed; empty if it can.
    logged: as what it counts in the program; None for one that may come and go (a cast, a copy).
    fresh: whether its outputs are new memory.
    dim: name of the argument that names the axis it works along; "" if it has none, or only reshapes.
    mixing: whether it always works along the batch. from_host: whether it takes in what Python has made.
    value_free, empty: whether its outputs do not depend on values, whether they are not set at all.
    opaque: whether nobody knows what it does to the sample axis.
    redirects: whether it gives a tensor other memory.
    fills: whether what it writes to does not depend on what was there.
    several: whether it returns several values.
    training, momentum: of a BatchNorm, the positions of these arguments. running: whether it moves running statistics.
    dropout: whether it can drop.
    plain: whether it can be given anything beside tensors (instead of a second tensor it may get a number).
    numbers: positions of the arguments that may be numbers to compute with. tensor_lists: of those that are lists of
    tensors.
    """

    kind: Kind
    written: tuple[int | str, ...] = ()
    refusal: str = ""
    logged: Any = None
    fresh: bool = False
    dim: str = ""
    mixing: bool = False
    from_host: bool = False
    value_free: bool = False
    empty: bool = False
    opaque: bool = False
    redirects: bool = False
    fills: bool = False
    several: bool = False
    training: int = -1
    momentum: int = -1
    running: bool = False
    dropout: bool = False
    plain: bool = True
    numbers: tuple[int, ...] = ()
    tensor_lists: tuple[int, ...] = ()


# By identity, and so held: hashing an operation is a call of Python.
KNOWN: dict[int, Traits] = {}
_HELD: list[Any] = []


def traits(func: Any) -> Traits:
    """The traits of an operation as a dispatch mode sees it (an OpOverload or a higher-order operator)."""
    try:
        return KNOWN[id(func)]
    except KeyError:
        _HELD.append(func)
        return KNOWN.setdefault(id(func), _traits(func))


def _traits(func: Any) -> Traits:
    if not isinstance(func, torch._ops.OpOverload):
        return Traits("cheap", logged=func, opaque=True)
    name = func._schema.name.removeprefix("aten::")
    aliases = any(r.alias_info is not None for r in func._schema.returns)
    return Traits(
        _kind(func),
        _written(func),
        _refusal(func),
        logged=None if name in _TRANSPARENT else aten.view.default if name in _RESHAPING else func,
        fresh=not aliases and name not in _RESHAPING,
        dim=_dim(func, name),
        mixing=name in _MIXING,
        from_host=name == "lift_fresh",
        value_free=name in _VALUE_FREE or name in _EMPTY,
        empty=name in _EMPTY,
        opaque=func.namespace not in _KNOWN_NAMESPACES,
        redirects=name in _REDIRECTING,
        fills=torch.Tag.nondeterministic_seeded in func.tags and name not in _DRAWS_FROM_WRITTEN,
        several=len(func._schema.returns) != 1,
        training=position(func, "training"),
        momentum=max(position(func, "momentum"), position(func, "exponential_average_factor")),
        running=position(func, "running_mean") >= 0,
        dropout=position(func, "dropout_p") >= 0,
        plain=[str(a.type) for a in func._schema.arguments] != ["Tensor"] or name == "lift_fresh",
        numbers=_numbers(func, name),
        tensor_lists=tuple(i for i, a in enumerate(func._schema.arguments) if _item(a) == "List[Tensor"),
    )


def known(func: Any) -> bool:
    """Whether its kind is no guess: it is in a list of this file, or its tags and its schema tell."""
    found = traits(func)
    if found.kind != "cheap" or found.refusal or found.logged is None or found.value_free:
        return True
    if found.opaque:
        return False
    name = func._schema.name.removeprefix("aten::").rstrip("_")
    listed = name in _CHEAP or name in _STRUCTURAL or name in _RESHAPING
    return listed or torch.Tag.pointwise in func.tags or _views(func)


def _views(func: torch._ops.OpOverload) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _item(argument: Any) -> str:
    """The type of an argument without "optional"; of a list, that of its entries, if they are no tensors."""
    found = str(argument.type).replace("Optional[", "").rstrip("]")
    return found if found == "List[Tensor" else found.removeprefix("List[")


def _numbers(func: torch._ops.OpOverload, name: str) -> tuple[int, ...]:
    if name in _COUNTING:
        return ()
    # How large a random number may be is a whole number, and one to compute with.
    draws = torch.Tag.nondeterministic_seeded in func.tags
    declared = [(a.name, _item(a)) for a in func._schema.arguments]
    return tuple(i for i, (n, t) in enumerate(declared) if t in _NUMBERS or (draws and t == "int" and n != "size"))


def _kind(func: torch._ops.OpOverload) -> Kind:
    if func in EXPENSIVE:
        return "expensive"
    if func in BATCH_NORM:
        return "batch_norm"
    gives_tensors = any("Tensor" in str(r.type) for r in func._schema.returns)
    if torch.Tag.nondeterministic_seeded in func.tags:
        return "random" if gives_tensors or _written(func) else "host"  # which kernel attention would take
    if torch.Tag.data_dependent_output in func.tags and not gives_tensors:
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


def _dim(func: torch._ops.OpOverload, name: str) -> str:
    if _views(func) or name in _STRUCTURAL:
        return ""
    names = [a.name for a in func._schema.arguments]
    return next((n for n in ("dim", "dims") if n in names), "")


def _refusal(func: torch._ops.OpOverload) -> str:
    if func.namespace in _COLLECTIVE_NAMESPACES:
        return f"the shallow part communicates between processes ({func}), as SyncBatchNorm does"
    if func in RECURRENT:
        return f"the shallow part uses a fused recurrent kernel ({func})"
    if func._schema.name == "aten::randperm":
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
    at = position(func, name)
    if at < 0:
        return None
    return args[at] if at < len(args) else func._schema.arguments[at].default_value


def position(func: Any, name: str) -> int:
    """Of an argument; -1 if there is none of that name."""
    try:
        return _POSITIONS[id(func), name]
    except KeyError:
        _HELD.append(func)
        found = [i for i, a in enumerate(func._schema.arguments) if a.name == name]
        return _POSITIONS.setdefault((id(func), name), found[0] if found else -1)


_POSITIONS: dict[tuple[int, str], int] = {}

# What an operation is that hands on what it gets.
HANDS_ON = traits(aten.detach.default)
