"""What a forward pass leaves behind outside of tensors: attributes of modules, and the state of random generators.

(Writes to tensors that outlive a pass are undone by the pass itself, see `replay`.)
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_CONTAINERS = (list, dict, set)
# nn.Module's own bookkeeping, which a forward pass does not touch. (`_buffers` it may: `self.buffer = ...`.)
_BOOKKEEPING = frozenset(vars(nn.Module())) - {"_buffers", "training"}


class Attributes:
    """The attributes of modules, one level deep: a list of auxiliary losses is emptied again, a counter set back."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._saved: list[tuple[nn.Module, dict[str, Any], list[tuple[Any, Any]]]] = []
        for module in modules:
            attributes = dict(vars(module))
            contents = [
                (v, v.copy()) for k, v in attributes.items() if isinstance(v, _CONTAINERS) and k not in _BOOKKEEPING
            ]
            self._saved.append((module, attributes, contents))

    def restore(self) -> None:
        for module, attributes, contents in self._saved:
            now = vars(module)
            if len(now) != len(attributes) or any(now.get(k) is not v for k, v in attributes.items()):
                now.clear()
                now.update(attributes)
            for container, content in contents:
                if isinstance(container, list):
                    container[:] = content
                else:
                    container.clear()
                    container.update(content)


class HostRandom:
    """The state of Python's and NumPy's global generators."""

    def __init__(self) -> None:
        self._numpy = getattr(sys.modules.get("numpy"), "random", None)
        self._python_state = random.getstate()
        self._numpy_state = self._numpy.get_state() if self._numpy else None

    def restore(self) -> None:
        random.setstate(self._python_state)
        if self._numpy:
            self._numpy.set_state(self._numpy_state)


class TorchRandom:
    """The state of torch's global generators on the CPU and on the device in use. No device is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._cpu_state = torch.get_rng_state()
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._device = device
        self._device_state = self._module.get_rng_state(device) if self._module else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu_state)
        if self._module:
            self._module.set_rng_state(self._device_state, self._device)
