"""Lightning modules as people write them, fitted quietly, and the loop by hand that they are compared with."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import halfway
from halfway.integrations.lightning import ForwardBlocking

RATIO = 0.4


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
        nn.Sequential(nn.Conv2d(6, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(8, 5),
    )


def data(samples: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(samples, 3, 8, 8, generator=generator), torch.arange(samples) % 5)


def loader(samples: int = 48, **settings: Any) -> DataLoader:
    return DataLoader(data(samples), batch_size=12, **settings)


class Module(pl.LightningModule):
    """As people write them: forward, and a step that calls self(...)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.sizes.append(len(x))
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class NoForward(Module):
    """Or without a forward, and without batch_idx."""

    forward = pl.LightningModule.forward

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(self.net(x), y)


class CallsTheNet(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.net(x), y)


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(x), y))
        optimizer.step()


def fit(
    module: pl.LightningModule,
    *callbacks: pl.Callback,
    data: Any = None,
    checkpoint: str | Path | None = None,
    **settings: Any,
) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    if not any(isinstance(c, ModelCheckpoint) for c in callbacks):
        quiet["enable_checkpointing"] = False
    trainer = pl.Trainer(callbacks=list(callbacks), **{"max_epochs": 2, "devices": 1, **quiet, **settings})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        trainer.fit(module, loader() if data is None else data, ckpt_path=checkpoint)
    return trainer


def by_hand(
    at: str = "0", epochs: int = 2, accumulate: int = 1, dtype: torch.dtype | None = None, **settings: Any
) -> tuple[nn.Module, halfway.ForwardBlocker]:
    """The same training without Lightning."""
    model = network()
    blocker = halfway.ForwardBlocker(model, at, settings.pop("prune_ratio", RATIO), **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        blocker.set_epoch(epoch)
        for i, (x, y) in enumerate(loader()):
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                x, y = blocker(x, y)
                loss = F.cross_entropy(model(x), y)
            (loss / accumulate).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model, blocker


def same(module: Any, model: nn.Module) -> None:
    found, expected = module.net.state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def stats_of(blocking: ForwardBlocking) -> halfway.Stats:
    assert blocking.blocker is not None
    return blocking.blocker.stats
