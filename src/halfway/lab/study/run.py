"""The runs of a study in several processes of one thread each: on a CPU that is far faster than one with many threads.

A run folder exists while its run is under way, so that an interrupted one goes on; its results become a line of the
ledger, and only then the folder is deleted.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..progress import Bar
from . import ledger
from .plan import Run

_STOP = None


def todo(runs: Sequence[Run], results: Path) -> list[Run]:
    """Those that are not in the ledger yet, each once."""
    known = {entry["key"] for entry in ledger.read(results)}
    return list({run.key: run for run in runs if run.key not in known}.values())


def carry_out(runs: Sequence[Run], folder: Path, results: Path, workers: int, command: str) -> int:
    """Train all runs; returns how many failed. An error of one run does not stop the others.

    Args:
        folder: of the run folders.
        results: the ledger.
        workers: processes.
        command: kept with the results.
    """
    context = multiprocessing.get_context("spawn")
    waiting, done, stopping = context.Queue(), context.Queue(), context.Event()
    for each in [*runs, *[_STOP] * workers]:
        waiting.put(each)
    processes = [
        context.Process(target=_work, args=(waiting, done, stopping, folder, command))
        for _ in range(min(workers, len(runs)))
    ]
    failed = 0
    with _one_thread_each(), _interruptible(), Bar(len(runs), "runs", "run") as bar:
        for process in processes:
            process.start()
        try:
            for _ in range(len(runs)):
                run, entry, error = _next(done, processes)
                if entry is None:
                    failed += 1
                    bar.say(f"FAILED {run.label}\n{error}")
                else:
                    ledger.append(results, entry)
                    shutil.rmtree(folder / run.key, ignore_errors=True)
                    bar.say(f"{run.label}: {entry['score']:.2f} %")
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


def _next(done: Any, processes: Sequence[Any]) -> Any:
    """The next result; an error if every process has died."""
    import queue

    while True:
        try:
            return done.get(timeout=5)
        except queue.Empty:
            if not any(process.is_alive() for process in processes):
                raise RuntimeError(
                    "all processes of the study have ended before their runs; the same command goes on"
                ) from None


def _work(waiting: Any, done: Any, stopping: Any, folder: Path, command: str) -> None:
    """One process: runs from the queue until there are none. SIGINT ends it after the step."""
    # Ctrl-C in a terminal reaches the whole group of processes, and the parent passes it on: twice would end a run at
    # once, without a checkpoint.
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    import torch

    from ..comparison.run import Loader
    from ..training import session
    from ..training.run_folder import RunFolder
    from ..training.run_result import RunResult

    torch.set_num_threads(1)
    device = torch.device("cpu")
    load = Loader(device)
    while (run := _taken(waiting, stopping)) is not _STOP:
        where = RunFolder(folder / run.key)
        try:
            if not session.train(run.recipe, load(run.recipe), device, where, True, command, show=False):
                return
            done.put((run, ledger.record(run, RunResult.read(where.path)), ""))
        except KeyboardInterrupt:
            return
        except Exception:
            done.put((run, None, traceback.format_exc()))


def _taken(waiting: Any, stopping: Any) -> Any:
    """The next run; none if the study is interrupted, or its own process is gone and would keep no results."""
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
