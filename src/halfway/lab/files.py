"""Writing files completely or not at all: a reader, or a resumed run, never sees half of one."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..state.files import replacing

_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFullError(OSError):
    """There was no room for a file. The file it was to replace is still there, and no part of the new one is left."""

    def __str__(self) -> str:
        return f"the disk is full: {self.filename} could not be written; free some space"


@contextlib.contextmanager
def naming_a_full_disk(path: Path) -> Iterator[None]:
    """Turn the errors of a full disk into `DiskFullError`. path: the file being written."""
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        # torch.save notices that too little was written, and hides the reason behind its own error.
        reason: BaseException | None = error
        while reason is not None:
            if isinstance(reason, OSError) and reason.errno in _FULL:
                raise DiskFullError(reason.errno, "the disk is full", str(path)) from error
            reason = reason.__cause__ or reason.__context__
        raise


def write_whole(path: Path, text: str) -> None:
    """Write text, creating folders as needed."""
    with naming_a_full_disk(path), replacing(path) as file:
        file.write(text.encode("utf-8"))


def write_tensors(path: Path, content: Any) -> None:
    """Write what `torch.load(path, weights_only=True)` reads, creating folders as needed."""
    import torch

    with naming_a_full_disk(path), replacing(path) as file:
        torch.save(content, file)


def write_json(path: Path, content: Any, indent: int = 2) -> None:
    write_whole(path, json.dumps(content, indent=indent) + "\n")
