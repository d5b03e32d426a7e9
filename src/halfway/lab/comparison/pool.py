"""Runs in several processes of one thread each: on a CPU that is far faster than one with many threads.

Each process takes the next run when it has ended one. After Ctrl-C each stops after its step and keeps a checkpoint.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import DiskFullError
from ..progress import Bar
from ..recipes.schema import Recipe

_STOP = None


@dataclass(frozen=True)
class Job:
    """A run: what to train, in which run folder, and what to call it."""

    recipe: Recipe
    folder: Path
    label: str


def train(jobs: Sequence[Job], workers: int, command: str, ended: Callable[[int], str]) -> int:
    """Train all runs; returns how many failed. An error of one run does not stop the others.

    Args:
        workers: processes.
        command: kept with the results.
        ended: called here with the position of each run that has been trained; returns what to say of it.
    """
    if not jobs:
        return 0
    context = multiprocessing.get_context("spawn")
    waiting, done, stopping = context.Queue(), context.Queue(), context.Event()
    for each in [*enumerate(jobs), *[_STOP] * workers]:
        waiting.put(each)
    processes = [
        context.Process(target=_work, args=(waiting, done, stopping, command)) for _ in range(min(workers, len(jobs)))
    ]
    failed, unreported = 0, {position: job.label for position, job in enumerate(jobs)}
    with _one_thread_each(), _interruptible(), Bar(len(jobs), "runs", "run") as bar:
        for process in processes:
            process.start()
        try:
            for _ in range(len(jobs)):
                position, error = _next(done, processes, unreported)
                label = unreported.pop(position)
                if isinstance(error, DiskFullError):
                    raise error
                if error is None:
                    told, error = _told(ended, position)
                failed += error is not None
                bar.say(f"{label}: {told}" if error is None else f"FAILED {label}\n{error}")
                bar.update()
        except BaseException:
            stopping.set()  # one that is about to end its run does not take another
            waiting.cancel_join_thread()  # else this process would wait until what is left in the queue is taken
            for process in processes:  # each stops after its step and keeps a checkpoint
                with contextlib.suppress(ProcessLookupError, TypeError):
                    os.kill(process.pid, signal.SIGINT)  # type: ignore[arg-type]
            raise
        finally:
            for process in processes:
                process.join()
    return failed


def _told(ended: Callable[[int], str], position: int) -> tuple[str, str | None]:
    """What to say of a run that has been trained, or the error with which its results were not taken over. What cannot
    be written ends everything: other results would be lost as well."""
    try:
        return ended(position), None
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            raise
        return "", traceback.format_exc()
    except Exception:
        return "", traceback.format_exc()


def _next(done: Any, processes: Sequence[Any], unreported: Mapping[int, str]) -> Any:
    """The next result; an error if every process has died."""
    import queue

    while True:
        try:
            return done.get(timeout=5)
        except queue.Empty:
            if not any(process.is_alive() for process in processes):
                raise ValueError(
                    f"the processes have died before these runs ended: {'; '.join(unreported.values())}. If memory ran "
                    "out, take fewer --workers; the same command goes on"
                ) from None


def _work(waiting: Any, done: Any, stopping: Any, command: str) -> None:
    """One process: runs from the queue until there are none. SIGINT ends it after the step."""
    # Ctrl-C in a terminal reaches the whole group of processes, and the parent passes it on: twice would end a run at
    # once, without a checkpoint.
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    import torch

    from ..data.loader import Loader
    from ..training import session
    from ..training.run_folder import RunFolder

    torch.set_num_threads(1)
    device = torch.device("cpu")
    load = Loader(device)
    while (taken := _taken(waiting, stopping)) is not _STOP:
        position, job = taken
        try:
            folder = RunFolder(job.folder)
            if not session.train(job.recipe, load(job.recipe), device, folder, True, command, show=False):
                return
            done.put((position, None))
        except KeyboardInterrupt:
            return
        except DiskFullError as error:
            done.put((position, error))
            return
        except Exception:
            done.put((position, traceback.format_exc()))


def _taken(waiting: Any, stopping: Any) -> Any:
    """The next run; none after an interruption, or if the process that started this one is gone."""
    parent = multiprocessing.parent_process()
    if stopping.is_set() or (parent is not None and not parent.is_alive()):
        return _STOP
    try:
        return waiting.get()
    except KeyboardInterrupt:
        return _STOP


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM is like Ctrl-C meanwhile: else the processes would go on without the one that keeps their results. A
    shell's background jobs ignore SIGINT; here it counts."""
    try:
        before = {name: signal.signal(name, signal.default_int_handler) for name in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, which alone receives signals
        yield
        return
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes read these before they import torch."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
