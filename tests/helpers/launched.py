"""Scripts that are started as users start them, alone or by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys

from tests import ROOT

_TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
# A thread of Gloo that still frees a gradient's sum when Python ends aborts the process: pytorch/pytorch#190489. It
# happens in a few of a hundred launches on a busy machine, and is nothing that a script could wait for.
_ABORTED_AT_EXIT = "terminate called without an active exception"


def run(*command: str, processes: int = 1) -> str:
    """What Python prints of the command; one that fails is a failure of the test. Launches that Gloo aborts are
    repeated once."""
    launch = [sys.executable, *(_TWO if processes == 2 else ()), *command]
    for _ in range(2):
        done = subprocess.run(
            launch,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        if processes == 1 or _ABORTED_AT_EXIT not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
