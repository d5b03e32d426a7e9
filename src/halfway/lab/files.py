"""Writing files whole or not at all: whoever reads, or resumes after an interruption, never sees half of one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Write aside and rename; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def write_tensors(path: Path, content: Any) -> None:
    """What `torch.load(path, weights_only=True)` reads, flushed to the disk before it takes its name."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    with open(aside, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def write_json(path: Path, content: Any, indent: int = 2) -> None:
    write_whole(path, json.dumps(content, indent=indent) + "\n")
