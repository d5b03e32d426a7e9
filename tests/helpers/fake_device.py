"""A training step on a device that exists in name only: whatever the host would wait for is an error there.

`torch`'s fake tensors have shapes, strides, types and a device, but no values. Everything that needs a value
(`.item()`, `bool(t)`, `.tolist()`, `.numpy()`, a shape that depends on data) raises. Fake CUDA tensors would be the
obvious choice, but without a driver they run no backward pass and have no generator. So the device is "cpu:0": for
fake tensors that is another device than "cpu", where tensors are made if no device is named. A tensor of the one and a
tensor of the other do not add up, and a copy between the two is an operation that a mode can see: it stands for a copy
between host and device. Kernels, autograd and autocast are those of the CPU.

A fake step cannot rehearse, for proofs compare values. So a program is trained on real tensors first, until nothing is
new, and then all that it holds is replaced by fake tensors: the model, the optimizer, what selector and engine keep.

What is not real about it, none of which reads a value:

- a fake tensor answers `.device` by an operation, `prim.device`, which real ones do not run: the engine is told that it
  may come and go;
- fake tensors have no addresses: where the engine compares them, the identity of their storage stands in;
- plans are found by a key that holds the device of the batch: the keys are renamed;
- `torch.Generator("cpu:0").device` is "cpu": a subclass says "cpu:0";
- a small tensor that is made on the host has values, as it would have (fake tensors keep those of single numbers
  only, if they are not told otherwise);
- ids on "cpu:0" count as ids on a device, which `SampleMemory` decides by the type of the device;
- shortcuts of the engine for plain tensors (`type(t) is Tensor`) are not taken. `NoWaiting`, which looks at real
  tensors, covers those.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import halfway
from halfway.engine import footprint, ops
from halfway.engine.sharding import memory
from halfway.state import sample_memory

HOST, DEVICE = torch.device("cpu"), torch.device("cpu", 0)
aten = torch.ops.aten


class Waits(AssertionError):
    """Something would wait for the device."""


class Device(TorchDispatchMode):
    """Refuses what fake tensors would let pass, and counts.

    Attributes:
        uploads: copies from the host to the device for which nothing waits, by operation.
        waits: what would have waited. Noted, because whoever caused it may catch the error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[str] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args)
        before = {_place(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if func is aten._to_copy.default and (kwargs or {}).get("device") == DEVICE and args[0].constant is not None:
            # Fake tensors would go on to know its values, and forget the device for that.
            args = (torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype),)
        try:
            out = func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise self.waiting(func, "needs values") from error
        after = {_place(t) for t in tree_leaves(out) if isinstance(t, Tensor)}
        if before | after >= {HOST, DEVICE}:
            if DEVICE in before and after == {HOST}:
                raise self.waiting(func, "copies from the device to the host")
            if not ops.argument(func, "non_blocking", args, kwargs or {}):
                raise self.waiting(func, "copies from the host to the device, not non_blocking")
            self.uploads.append(str(func))
        return out

    def waiting(self, func: Any, why: str) -> Waits:
        """The error to raise."""
        self.waits.append(f"{func} waits for the device: it {why}")
        return Waits(self.waits[-1])


class _FromPython(TorchFunctionMode):
    """Refuses tensors of Python's numbers on the device: they are made on the host, copied, and waited for."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = kwargs.get("device")
        if func is Tensor.new_tensor and asked is None:
            asked = args[0].device
        if func in (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor) and asked == DEVICE:
            raise self._device.waiting(func, "copies Python's numbers to the device")
        return func(*args, **kwargs)


def _place(t: Tensor) -> torch.device | None:
    """Where a tensor lies; None for a number on the host, which a kernel takes as an argument."""
    where = t.fake_device if isinstance(t, FakeTensor) else t.device
    return None if where == HOST and not t.ndim else where


class Fakes:
    """Replaces tensors by fake ones on the device, the same by the same."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self._fakes: dict[int, Tensor] = {}
        self._held: list[Any] = []  # an id that is looked up later must not be given to another object
        self._seen: set[int] = set()

    def of(self, value: Any) -> Any:
        """`value` with fake tensors; whatever it consists of is changed in place, except tuples."""
        if isinstance(value, (FakeTensor, str, type, types.FunctionType, types.MethodType)):
            return value
        if isinstance(value, Tensor):
            return self._fake(value)
        if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
            entries = [self.of(v) for v in value]
            if all(a is b for a, b in zip(entries, value, strict=True)):
                return value
            return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
        if id(value) in self._seen:
            return value
        self._seen.add(id(value))
        self._held.append(value)
        if isinstance(value, list):
            value[:] = [self.of(v) for v in value]
        elif isinstance(value, dict):
            entries = {self.of(k) if isinstance(k, Tensor) else k: self.of(v) for k, v in value.items()}
            value.clear()
            value.update(entries)
        elif hasattr(value, "__dict__") and not isinstance(value, types.ModuleType):
            self.of(vars(value))
        return value

    def _fake(self, t: Tensor) -> Tensor:
        if id(t) not in self._fakes:
            with self.mode:
                fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=DEVICE)
            self._fakes[id(t)] = nn.Parameter(fake, t.requires_grad) if isinstance(t, nn.Parameter) else fake
            self._held.append(t)
        return self._fakes[id(t)]


class _Generator(torch.Generator):
    device = DEVICE


@contextlib.contextmanager
def on_the_device(*program: Any) -> Iterator[tuple[Device, list[Any]]]:
    """What `program` consists of (model, blocker, optimizer, batch) is on the device from now on, for ever; what runs
    in here runs there."""
    fakes = Fakes()
    moved = [fakes.of(part) for part in program]
    for blocker in program:
        if isinstance(blocker, halfway.ForwardBlocker) and blocker._engine is not None:
            plans = blocker._engine._prover._plans
            for key in list(plans):
                plans[_renamed(key)] = plans.pop(key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ops.KNOWN, id(torch.ops.prim.device.default), ops.Traits("cheap", plain=False))
        patch.setattr(footprint, "_address", memory)
        patch.setattr(sample_memory, "_on_host", lambda ids: ids.device == HOST)
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(fake_tensor, "CONSTANT_NUMEL_LIMIT", 64)
        with fakes.mode, Device() as device, _FromPython(device):
            yield device, moved
    assert not device.waits, device.waits


def _renamed(key: Any) -> Any:
    if isinstance(key, tuple):
        entries = [_renamed(k) for k in key]
        return type(key)(*entries) if hasattr(key, "_fields") else tuple(entries)
    return DEVICE if isinstance(key, torch.device) else key
