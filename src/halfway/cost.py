"""What a cut saves, before any training: FLOPs counted on one forward pass.

Let T be the FLOPs of a training step per sample (forward and backward) and F those of the shallow forward. With
probe and replay a pruned sample pays F, a retained one T: a step costs (1 - p) + p F/T of full training. A run costs
less saving than a step, since the first and last epochs prune nothing: every table has both columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
# Backward FLOPs of fused attention per forward FLOP: five products of which one repeats the forward, against two.
_ATTENTION_BACKWARD = 2.5


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
        total = self.forward + self.backward
        return self._shallow / total if total else 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", None)
        if packet in flop_registry:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
            self.forward += flops
            self.backward += flops * _backward_factor(func, args)
        return out


def _backward_factor(func: Any, args: tuple[Any, ...]) -> float:
    operands = [a.requires_grad for a in args if isinstance(a, Tensor)]
    if "attention" in str(func):
        return _ATTENTION_BACKWARD if any(operands) else 0.0
    if func in (aten.addmm.default, aten.baddbmm.default, aten.addmv.default):
        operands = operands[1:]
    return float(sum(operands[:2]))


@dataclass(frozen=True)
class Cost:
    """Cost relative to full training (1.0 is training on all samples).

    shallow_share: F/T, the shallow forward relative to a whole training step of one sample.
    step: one step in which samples are pruned. run: a whole run, with the epochs in which none are.
    """

    shallow_share: float
    step: float
    run: float


def relative_cost(shallow_share: float, ratio: float, *, replayed: bool = True) -> float:
    """Cost of a step that prunes `ratio` of its samples: (1 - p) + p F/T replayed, (1 - p) + F/T recomputed."""
    return 1 - ratio + shallow_share * (ratio if replayed else 1.0)
