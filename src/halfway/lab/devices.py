"""The device that a command line asks for."""

from __future__ import annotations

import torch


def named(name: str) -> torch.device:
    """The device of `--device NAME`, if this machine has it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device takes cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cpu":
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if not found:
        raise ValueError(f"--device {name}: torch finds no CUDA device here; leave it out, or take --device cpu")
    if (device.index or 0) >= found:
        raise ValueError(f"--device {name}: torch finds {found} CUDA device(s) here, cuda:0 to cuda:{found - 1}")
    return device
