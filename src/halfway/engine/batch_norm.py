"""BatchNorm, taken apart: the statistics of all samples on the one hand, normalising with them on the other.

Every BatchNorm operation of PyTorch (native, cuDNN, MIOpen) begins with (input, weight, bias, running_mean,
running_var, ...) and returns (output, mean, inverse standard deviation, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import ops

aten = torch.ops.aten


class Step(NamedTuple):
    """What a running statistic was and became in the probe."""

    running: Tensor
    before: Tensor
    after: Tensor
    momentum: float


def forward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], moved: list[Tensor | None]) -> tuple[Any, ...]:
    """A training-mode forward of N samples that moves `moved`, copies of the running statistics, in their stead."""
    return func(*args[:3], *moved, *args[3 + len(moved) :], **kwargs)


def normalise(func: Any, args: tuple[Any, ...], mean: Tensor, inverse_std: Tensor) -> tuple[Any, ...]:
    """What `func` returns, had it found these statistics. Autograd saves them and treats them as those of the input."""
    x, weight, bias = args[:3]
    out = aten.native_batch_norm(x, weight, bias, mean, inverse_std.pow(-2), False, 0.0, 0.0)[0]
    reserve = [x.new_empty(0, dtype=torch.uint8)] * (len(func._schema.returns) - 3)
    return (out, mean, inverse_std, *reserve)


def move(steps: list[Step]) -> None:
    """Running statistics take the steps that they have once taken, from where they are now.

    Usually each is what it was, and becomes what it became, to the bit. But DDP has ranks take over the first one's
    before each call, and a BatchNorm that runs twice has moved already.
    """
    at_once = len({id(s.running) for s in steps}) == len(steps) and len({s.momentum for s in steps}) == 1
    for some in [steps] if at_once else [[s] for s in steps]:  # at once: three launches for all of them
        if some:
            running = [s.running.data for s in some]
            torch._foreach_sub_(running, [s.before for s in some])
            torch._foreach_mul_(running, 1 - some[0].momentum)
            torch._foreach_add_(running, [s.after for s in some])


def momentum(traits: ops.Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The weight of the batch in a new running statistic; cuDNN and MIOpen call it by another name."""
    for name in ("momentum", "exponential_average_factor"):
        if name in kwargs:
            return kwargs[name]
    return args[traits.momentum]


class WithoutCudnn(TorchFunctionMode):
    """Has `F.batch_norm` use PyTorch's own kernel where the probe has used that of cuDNN or MIOpen.

    Theirs keep a reserve for their backward pass that only their own forward can make, so a replay cannot use them.
    PyTorch's own is called by its name: otherwise an empty reserve is made for it, one operation more than the probe
    has run.

    Args:
        recorded: which operation comes next on the tape; None: none.
    """

    def __init__(self, recorded: Callable[[], Any]) -> None:
        super().__init__()
        self._recorded = recorded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A mode does not see what happens within a function that it was shown: torch.batch_norm in F.batch_norm.
        own = _OWN.get(func)
        if own is not None and self._recorded() in _WITH_A_RESERVE:
            return own(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _own(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    return torch.native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)[0]


def _own_in_torch(*args: Any, cudnn_enabled: bool = True, **kwargs: Any) -> Tensor:
    return torch.native_batch_norm(*args[:8], **kwargs)[0]


_OWN = {F.batch_norm: _own, torch.batch_norm: _own_in_torch}
_WITH_A_RESERVE = (aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default)


def trains(traits: ops.Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a BatchNorm operation normalises with the batch's own statistics. (Some always do, and do not say.)"""
    if kwargs and "training" in kwargs:
        return kwargs["training"] is not False
    return traits.training < 0 or args[traits.training] is not False
