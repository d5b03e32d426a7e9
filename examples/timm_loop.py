"""timm: mixup, EMA, its optimizers and schedules, cut at one of timm's stages (`halfway layers resnet10t`).

python examples/timm_loop.py    # with --model convnext_atto --at stages.0, or any other
"""

from __future__ import annotations

import argparse

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch.utils.data import DataLoader

import halfway
from digits import digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet10t", help="any timm name")
    parser.add_argument("--at", default="layer1", help="the cut; `halfway layers MODEL` lists timm's stages")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1797, help="of the 1797 digits")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(digits(32, options.samples), batch_size=64, shuffle=True, drop_last=True)
    model = timm.create_model(options.model, num_classes=10).to(device)
    ema = ModelEmaV3(model, decay=0.99)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    schedule, _ = create_scheduler_v2(optimizer, num_epochs=options.epochs, updates_per_epoch=len(loader))
    mixup = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)
    criterion = SoftTargetCrossEntropy()
    blocker = halfway.ForwardBlocker(model, at=options.at, prune_ratio=0.4)
    for epoch in range(options.epochs):
        blocker.set_epoch(epoch)
        for x, y in loader:
            x, y = mixup(x.to(device), y.to(device))
            x, y = blocker(x, y)  # after the mixing, and right before the model
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update(model)
        schedule.step(epoch + 1)
        print(f"epoch {epoch}: loss {loss.item():.3f}")
    print(blocker.stats)


if __name__ == "__main__":
    main()
