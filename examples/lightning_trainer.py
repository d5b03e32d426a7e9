"""Lightning: one callback more, the module as it was. `python examples/lightning_trainer.py --devices 2` for DDP."""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
import torchvision
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import halfway
from digits import digits
from halfway.integrations.lightning import ForwardBlocking


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torchvision.models.resnet18(num_classes=10)

    def training_step(self, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        x, y, _ = batch
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        self.log("loss", losses.mean())
        return {"loss": losses.mean(), "losses": losses}  # the latter for selectors that learn from losses

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description="Lightning with halfway, on digits.")
    parser.add_argument("--selector", default="density", help="which method chooses (default: density, the paper's)")
    parser.add_argument("--precision", default="32-true", help="as for the Trainer, such as bf16-mixed")
    parser.add_argument("--devices", type=int, default=1, help="processes of a DDP training")
    parser.add_argument("--steps", type=int, default=28, help="training steps")
    options = parser.parse_args()
    pl.seed_everything(0)
    blocking = ForwardBlocking(at="net.layer1", prune_ratio=0.4, selector=options.selector, ids=2)
    trainer = pl.Trainer(
        max_epochs=1,
        limit_train_batches=options.steps,
        devices=options.devices,
        precision=options.precision,
        callbacks=[blocking],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(), DataLoader(halfway.WithIds(digits()), batch_size=64, shuffle=True, drop_last=True))
    if trainer.is_global_zero and blocking.blocker is not None:
        print(blocking.blocker.stats)


if __name__ == "__main__":
    main()
