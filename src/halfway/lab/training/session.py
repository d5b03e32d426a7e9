"""One session of training in a run folder: the device, the other processes, Ctrl-C, and the last message."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..data import Data
from ..environment import environment
from ..files import naming_a_full_disk
from ..recipes.schema import Recipe
from .loop import Training
from .rank import rank_and_size
from .run_folder import RunFolder


@contextlib.contextmanager
def processes() -> Iterator[torch.device]:
    """This process's device; under torchrun, the process group exists meanwhile."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if "WORLD_SIZE" not in os.environ:
        yield device
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def first_rank() -> bool:
    """Whether this process is the one that prints and writes."""
    return rank_and_size()[0] == 0


def alone() -> bool:
    """Whether there are no other processes."""
    return rank_and_size()[1] == 1


def train(
    recipe: Recipe,
    data: Data,
    device: torch.device,
    folder: RunFolder,
    resume: bool,
    command: str,
    show: bool = True,
) -> bool:
    """Train in the folder. Returns whether the training is finished; False after Ctrl-C.

    Args:
        resume: go on with what the folder holds.
        command: kept with the results.
        show: draw progress bars.
    """
    training = Training(recipe, data, device, folder, show)  # what it refuses leaves no folder
    if first_rank():
        folder.open(recipe, resume)
    with naming_a_full_disk(folder.path), folder.locked() if first_rank() else contextlib.nullcontext():
        if first_rank():
            folder.note_session(
                {
                    "command": command,
                    "steps": training.steps,
                    "full_steps": training.full_steps,
                    "data": data.description,
                    "images": data.images,
                    **environment(device),
                }
            )
        try:
            if training.ranks > 1:  # ranks would stop at different steps; the last round's checkpoint remains
                return training.run()
            with _interruptible() as stop:
                return training.run(stop)
        finally:
            if training.blocker is not None:
                training.blocker.remove()


@contextlib.contextmanager
def _interruptible() -> Iterator[Any]:
    """A function that returns whether Ctrl-C (or SIGTERM) arrived, so that no step is left half done.

    A second Ctrl-C interrupts at once.
    """
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        asked = True
        for name, handler in before.items():
            signal.signal(name, handler)
        print("\nstopping after this step (once more to stop at once)", file=sys.stderr)

    try:
        before = {name: signal.signal(name, ask) for name in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, which alone receives signals
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def command_line() -> str:
    """The current command, as one would type it."""
    return shlex.join(["halfway", *sys.argv[1:]])
