"""What FSDP2 (`fully_shard`) needs to be told, and how its parameters, and any other tensor, are looked at."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

# Types of tensors that lie in this process as a whole.
PLAIN = frozenset({Tensor, nn.Parameter})


def sharded(modules: list[nn.Module]) -> list[Any]:
    """Those of the modules that FSDP2 shards; none, if nobody has imported it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [m for m in modules if isinstance(m, fsdp.FSDPModule)]


def local(t: Tensor) -> Tensor:
    """The part of a DTensor that lies in this process; a plain tensor is itself."""
    return getattr(t, "_local_tensor", t)


def memory(t: Tensor) -> int:
    """Which memory a tensor lies in: the same for all its views. (Not its address, which empty tensors share.)"""
    return (t if type(t) in PLAIN else local(t)).untyped_storage()._cdata
