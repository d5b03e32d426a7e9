"""Real processes for tests, connected by gloo."""

from __future__ import annotations

import io
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Forked from a server that has imported torch once: starting a process takes a moment instead of seconds.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "halfway", "tests.helpers.processes"])


def run(size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """`function(rank, *args)` in `size` processes. Returns what they return, or raises the first error."""
    results, errors = outcomes(size, function, *args, timeout=timeout)
    for rank, error in enumerate(errors):
        if error:
            raise AssertionError(f"rank {rank}:\n{error}")
    return results


def outcomes(size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> tuple[list[Any], list[str]]:
    """What each process returned, and the traceback of each that raised ("" for the others)."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(there, folder, rank, size, function, args), daemon=True)
            process.start()
            there.close()
            children.append((process, here))
        results: list[Any] = [None] * size
        errors = [""] * size
        deadline = time.monotonic() + timeout
        for rank, (_, here) in enumerate(children):
            if here.poll(max(0.0, deadline - time.monotonic())):
                try:
                    # Through bytes: a tensor of its own would live in the memory of a process that has ended.
                    results[rank], errors[rank] = torch.load(io.BytesIO(here.recv_bytes()), weights_only=False)
                except EOFError:
                    errors[rank] = "died"
            else:
                errors[rank] = f"hung for {timeout} s"
        for process, _ in children:
            process.join(5)
            if process.is_alive():
                process.kill()
        return results, errors


def _child(pipe: Any, folder: str, rank: int, size: int, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    result, error = None, ""
    try:
        store = dist.FileStore(str(Path(folder) / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        result = function(rank, *args)
    except BaseException:
        error = traceback.format_exc()
    file = io.BytesIO()
    torch.save((result, error), file)
    pipe.send_bytes(file.getvalue())
    pipe.close()
    if dist.is_initialized() and not error:
        dist.destroy_process_group()
