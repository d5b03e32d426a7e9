"""Finding out, without an accelerator, whether code would wait for one."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoWaiting(TorchDispatchMode):
    """Refuses whatever would wait for a device: values read by the host, shapes that depend on data."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))
        if func is torch.ops.aten.index.Tensor:  # whole numbers do not
            waits = any(index is not None and index.dtype == torch.bool for index in args[1])
        if waits:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))
