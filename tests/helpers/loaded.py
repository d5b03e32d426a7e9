"""A small training whose batches are decided before they are loaded."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import halfway
from halfway.selectors import BalancedRemembered

N, B = 96, 16


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(N, 6, generator=generator), torch.arange(N) % 3)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))


class Repeating(Sampler):
    """Draws with replacement, so that what an earlier batch of the same epoch has shown matters."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return N

    def __iter__(self):
        return iter(torch.randint(N // 3, (N,), generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Run:
    """A training that notes which samples each step had."""

    def __init__(self, selector="last_loss", loader=DataLoader, workers: int = 0, source=None, **options) -> None:
        self.batches = halfway.PrunedBatchSampler(source or data(), B, 0.5, selector=selector, **options)
        extra = {"num_workers": workers, **({"prefetch_factor": 2} if workers else {})}
        self.loader = loader(halfway.WithIds(data()), batch_sampler=self.batches, **extra)
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.steps: list[list[int]] = []
        if isinstance(self.batches.selector, BalancedRemembered):
            self.batches.watch(self.model)

    def epoch(self, epoch: int | None, skip: int = 0, stop: int | None = None) -> None:
        if epoch is not None:
            self.batches.set_epoch(epoch, skip=skip)
        for done, (x, y, ids) in enumerate(self.loader, start=skip + 1):
            self.steps.append(ids.tolist())
            losses = F.cross_entropy(self.model(x), y, reduction="none")
            self.batches.observe(ids, losses)
            losses.mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if done == stop:
                return

    def state(self) -> dict:
        return copy.deepcopy(
            {"model": self.model.state_dict(), "batches": self.batches.state_dict(), "loader": self._loader_state()}
        )

    def _loader_state(self) -> dict:
        return self.loader.state_dict() if isinstance(self.loader, StatefulDataLoader) else {}

    def load(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.batches.load_state_dict(state["batches"])
        if isinstance(self.loader, StatefulDataLoader):
            self.loader.load_state_dict(state["loader"])
