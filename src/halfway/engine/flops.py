"""Counting FLOPs: of what really runs, and of the training step a forward pass implies.

Counted is what torch has a formula for: convolutions, matrix products and fused attention. Fused recurrent kernels
are not among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Backward FLOPs of fused attention per forward FLOP: five products of which one repeats the forward, against two.
_ATTENTION_BACKWARD = 2.5


class FlopCounter(TorchDispatchMode):
    """Counts the FLOPs of everything that really runs, a backward pass included: `total`.

    Like torch's FlopCounterMode, but right for the backward pass of grouped convolutions, where torch forgets the
    groups (a depthwise one of 64 channels counts 64-fold), and for the CPU's fused attention in old versions.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += flops_of(func, args, kwargs or {}, out)
        return out


class Meter(TorchDispatchMode):
    """Counts the FLOPs of a forward pass, of its part up to the cut, and of the backward pass it implies.

    The backward pass of a product or convolution costs its forward once for every operand that needs a gradient, so
    frozen layers, and the first layer, are counted for what they cost.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.forward = 0.0
        self.backward = 0.0
        self._shallow = 0.0

    def reached_cut(self) -> None:
        """Called when the forward pass leaves the cut."""
        self._shallow = self.forward

    @property
    def shallow_share(self) -> float:
        """F/T: the shallow forward relative to the whole training step; 0 if nothing was counted."""
        return self.share(self._shallow)

    def share(self, flops: float) -> float:
        """`flops` relative to the whole training step; 0 if nothing was counted."""
        total = self.forward + self.backward
        return flops / total if total else 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count(func, args, kwargs or {}, out)
        return out

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """An operation of the model; also one that was answered by somebody else and never came here."""
        flops = flops_of(func, args, kwargs, out)
        if flops:
            self.forward += flops
            self.backward += flops * _backward_factor(func, args)


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    from torch.utils.flop_counter import flop_registry  # here, for it imports Triton, which takes a while

    if func is aten.convolution_backward.default:
        return _convolution_backward(*args, **kwargs)
    packet: Any = getattr(func, "_overloadpacket", None)
    # Old versions do not know the CPU's fused attention; it counts like the others.
    formula = flop_registry.get(packet) or flop_registry.get(_SAME_AS.get(packet))
    return float(formula(*args, **kwargs, out_val=out)) if formula else 0.0


_SAME_AS = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


def _convolution_backward(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
) -> float:
    """Each of the two gradients takes part in the same multiplications as the forward pass did."""
    from torch.utils.flop_counter import conv_flop_count

    forward = conv_flop_count(x.shape, weight.shape, grad_out.shape, transposed=transposed)  # type: ignore[arg-type]
    return float(forward * sum(output_mask[:2]))


def _backward_factor(func: Any, args: tuple[Any, ...]) -> float:
    if not torch.is_grad_enabled():
        return 0.0
    operands = [a.requires_grad for a in args if isinstance(a, Tensor)]
    if "attention" in str(func):
        return _ATTENTION_BACKWARD if any(operands) else 0.0
    if func in (aten.addmm.default, aten.baddbmm.default, aten.addmv.default):
        operands = operands[1:]
    return float(sum(operands[:2]))
