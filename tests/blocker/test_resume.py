"""Stopped and resumed: bit-identical, wherever it was killed."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from halfway import Density, ForwardBlocker
from tests import ROOT

from ..helpers import processes, resumable

TOTAL = resumable.EPOCHS * resumable.STEPS_PER_EPOCH
GROUP = "stop and resume"


def run(folder: Path, *args: Any) -> int | None:
    """The exit code of a training in a process of its own."""
    process = processes.context.Process(target=resumable.train, args=(str(folder), *args))
    process.start()
    process.join(120)
    return process.exitcode


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(state, dict):
        return {k: v for name, value in state.items() for k, v in flat(value, f"{prefix}.{name}").items()}
    return {prefix: state}


def assert_identical(one: Any, other: Any) -> None:
    one, other = flat(one), flat(other)
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]) if isinstance(value, Tensor) else value == other[key], key


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("torchdata")
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(folder) == 0
    return torch.load(folder / "final.pt", weights_only=True)


def kill_and_resume(folder: Path, at: int, save_every: int, undisturbed: dict[str, Any]) -> None:
    assert run(folder, at, save_every) == -signal.SIGKILL
    assert not (folder / "final.pt").exists()
    assert run(folder, None, save_every) == 0
    assert_identical(torch.load(folder / "final.pt", weights_only=True), undisturbed)


# Also at the very first step, and at the first of an epoch.
KILLS = [0, resumable.STEPS_PER_EPOCH, random.Random(0).randrange(1, TOTAL)]


@pytest.mark.parametrize("at", KILLS)
def test_a_killed_training_resumes_bit_identically(at: int, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    kill_and_resume(tmp_path, at, 1 + at % 3, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_a_training_killed_anywhere_resumes_bit_identically(
    seed: int, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    chance = random.Random(100 + seed)
    kill_and_resume(tmp_path, chance.randrange(TOTAL), chance.randint(1, 5), undisturbed)


# -------------------------------------------------------------------- the state


def blocker_of(model: torch.nn.Module | None = None) -> ForwardBlocker:
    return resumable.make_blocker(model or resumable.make_model())


def trained(steps: int = 3) -> ForwardBlocker:
    model = resumable.make_model()
    blocker = blocker_of(model)
    blocker.set_epoch(0)
    for i in range(steps):
        model(blocker(torch.randn(8, 3, 6, 6) + i)).sum().backward()
    return blocker


def test_the_state_is_small_and_plain(tmp_path: Path) -> None:
    state = trained().state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 64 * 1024
    assert_identical(torch.load(tmp_path / "state.pt", weights_only=True), state)
    assert all(isinstance(v, (Tensor, int, float, str, type(None))) for v in flat(state).values())


def test_keys_and_shapes_of_the_state_are_the_same_before_and_after_training() -> None:
    before, after = flat(blocker_of().state_dict()), flat(trained().state_dict())
    assert before.keys() == after.keys()
    for key, value in before.items():
        if isinstance(value, Tensor):
            assert (value.shape, value.dtype) == (after[key].shape, after[key].dtype)


def test_distributed_checkpoint_saves_and_loads_it(tmp_path: Path, feature) -> None:
    import torch.distributed.checkpoint as dcp

    blocker = trained()
    dcp.save({"blocker": blocker}, checkpoint_id=tmp_path, no_dist=True)
    fresh = blocker_of()
    dcp.load({"blocker": fresh}, checkpoint_id=tmp_path, no_dist=True)
    assert_identical(fresh.state_dict(), blocker.state_dict())
    feature(GROUP, "torch.distributed.checkpoint", blocker.stats)


def test_distributed_checkpoint_of_another_configuration_is_refused(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"blocker": trained()}, checkpoint_id=tmp_path, no_dist=True)
    other = ForwardBlocker(resumable.make_model(), "0", 0.3, selector=Density(num_centroids=8), seed=3)
    with pytest.raises(Exception, match=r"prune_ratio: 0\.5 in the state, 0\.3 here"):
        dcp.load({"blocker": other}, checkpoint_id=tmp_path, no_dist=True)


def save_with_two(rank: int, folder: str) -> None:
    blocker = trained()
    if rank == 0:
        torch.save(blocker.state_dict(), Path(folder) / "two.pt")
    dist.barrier()


def test_another_number_of_processes_goes_on_and_says_so(tmp_path: Path) -> None:
    processes.run(2, save_with_two, str(tmp_path))
    state = torch.load(tmp_path / "two.pt", weights_only=True)
    blocker = blocker_of()
    with pytest.warns(UserWarning, match="saved by 2 processes and is loaded by 1"):
        blocker.load_state_dict(state)
    assert torch.equal(blocker.selector.state_dict()["centroids"], state["selector"]["centroids"])


# ---------------------------------------------------------------------- torchrun


def torchrun(folder: Path, *arguments: str) -> None:
    """A job of two nodes on this machine, with one process each."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    root = ROOT
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2"]
    command += [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=halfway",
        "--local-addr=127.0.0.1",
    ]
    command += ["-m", "tests.helpers.resumable", str(folder), *arguments]
    # Without the third, restarts of several nodes can meet the addresses of the round before, and hang:
    # https://github.com/pytorch/pytorch/issues/135712
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment = {**os.environ, **settings}
    nodes = [
        subprocess.Popen(
            command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    try:
        outputs = [node.communicate(timeout=180)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)


@pytest.mark.slow
@pytest.mark.matrix
def test_an_elastic_job_that_loses_a_worker_ends_with_the_same_weights(tmp_path: Path, feature) -> None:
    finals = []
    for name, arguments in (("undisturbed", ()), ("killed", ("10",))):
        folder = tmp_path / name
        folder.mkdir()
        torchrun(folder, *arguments)
        finals.append(torch.load(folder / "final.pt", weights_only=True))
    assert (tmp_path / "killed" / "resumed-at-8").exists()
    assert_identical(*finals)
    stats = torch.load(tmp_path / "killed" / "stats.pt", weights_only=True)
    assert stats["steps_replayed"] == TOTAL - 1
    feature(GROUP, "torchrun, two nodes, a worker killed", (stats["steps_replayed"], stats["recompute_reasons"]))
