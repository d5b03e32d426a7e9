"""What is recorded with every measurement: date, versions, machine."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__

_LIBRARIES = ("torchvision", "timm", "torchmetrics", "segmentation_models_pytorch")


def environment(device: torch.device) -> dict[str, Any]:
    """Date, versions and machine of this process."""
    versions = {"halfway": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for library in _LIBRARIES:
        if library in sys.modules:
            versions[library] = metadata.version(library)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "device": name},
        "threads": torch.get_num_threads(),
    }


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
