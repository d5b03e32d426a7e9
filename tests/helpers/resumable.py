"""A training that can be killed at any moment and resumed: alone (`train`), or as a script under torchrun.

Everything that makes a training random or stateful is in it: dropout, BatchNorm, momentum, shuffling, autocast.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfway import Density, ForwardBlocker, Schedule

EPOCHS, STEPS_PER_EPOCH, BATCH = 3, 6, 8


def make_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2)),
        nn.Conv2d(6, 6, 3, padding=1),
        nn.Dropout(0.2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


class Data(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __init__(self, ranks: int = 1) -> None:
        self.size = STEPS_PER_EPOCH * BATCH * ranks

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(i)
        return torch.randn(3, 6, 6, generator=generator), i % 4


def make_blocker(model: nn.Module, **kwargs: Any) -> ForwardBlocker:
    return ForwardBlocker(
        model, "0", 0.5, selector=Density(num_centroids=8), schedule=Schedule(start=0, stop=3), seed=3, **kwargs
    )


def step(model: nn.Module, blocker: ForwardBlocker, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    x, y = blocker(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def save(path: Path, state: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def train(folder: str, kill_at: int | None = None, save_every: int = 1) -> None:
    """Trains to the end, or is killed in the middle of step `kill_at`. Begins where the checkpoint in `folder` ends."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.set_num_threads(1)
    model = make_model()
    blocker = make_blocker(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator()
    loader = StatefulDataLoader(Data(), BATCH, shuffle=True, generator=generator)
    path = Path(folder) / "last.pt"
    first, done = 0, 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        blocker.load_state_dict(state["blocker"])
        loader.load_state_dict(state["loader"])
        torch.set_rng_state(state["random"])
        first, done = state["epoch"], state["done"]
    for epoch in range(first, EPOCHS):
        blocker.set_epoch(epoch)
        generator.manual_seed(epoch)  # or the loader resumes this epoch, but shuffles the next one in another order
        for x, y in loader:
            if done == kill_at:
                blocker(x, y)  # in the middle of a step
                os.kill(os.getpid(), signal.SIGKILL)
            step(model, blocker, optimizer, x, y)
            done += 1
            if done % save_every == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "blocker": blocker.state_dict(),
                    "loader": loader.state_dict(),
                    "random": torch.get_rng_state(),
                    "epoch": epoch,
                    "done": done,
                }
                save(path, state)
    stats = blocker.stats
    assert stats.steps == EPOCHS * STEPS_PER_EPOCH
    assert stats.steps_replayed == stats.steps - 1, stats
    save(Path(folder) / "final.pt", {"model": model.state_dict(), "blocker": blocker.state_dict()})


def train_elastic(folder: Path, kill_at: int | None) -> None:
    """One rank of a job under torchrun. Rank 1 is killed once, in the middle of step `kill_at`."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = make_model()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ddp = nn.parallel.DistributedDataParallel(model)
    blocker = make_blocker(ddp, timeout=30)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    path = folder / "last.pt"
    first = 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        blocker.load_state_dict(state["blocker"])
        first = state["done"]
        (folder / f"resumed-at-{first}").touch()
    data = Data(ranks)
    for done in range(first, EPOCHS * STEPS_PER_EPOCH):
        epoch, i = divmod(done, STEPS_PER_EPOCH)
        blocker.set_epoch(epoch)
        samples = [data[(i * BATCH + j) * ranks + rank] for j in range(BATCH)]
        x, y = torch.stack([s[0] for s in samples]), torch.tensor([s[1] for s in samples])
        if done == kill_at and rank == 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        step(ddp, blocker, optimizer, x, y)
        if rank == 0 and (done + 1) % 4 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(path, {**state, "blocker": blocker.state_dict(), "done": done + 1})
    if rank == 0:
        save(folder / "final.pt", {"model": model.state_dict(), "blocker": blocker.selector.state_dict()})
        save(folder / "stats.pt", vars(blocker.stats))
    dist.destroy_process_group()


if __name__ == "__main__":
    train_elastic(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
