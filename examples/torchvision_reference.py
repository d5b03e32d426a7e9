"""A loop in the manner of torchvision's references: v2 transforms, mixup or CutMix, EMA, channels_last, bfloat16."""

from __future__ import annotations

import argparse

import torch
import torchvision
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, default_collate
from torchvision.transforms import v2

import halfway
from digits import digits

CROP = v2.RandomCrop(32, padding=4)
MIX = v2.RandomChoice([v2.MixUp(alpha=0.2, num_classes=10), v2.CutMix(num_classes=10)])


def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    return MIX(*default_collate([(CROP(x), y) for x, y in samples]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet18", help="any of torchvision's")
    parser.add_argument("--at", default="layer1", help="the cut; `halfway layers MODEL` lists them")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1797, help="of the 1797 digits")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(digits(32, options.samples), 64, shuffle=True, drop_last=True, collate_fn=collate)
    model = torchvision.models.get_model(options.model, weights=None, num_classes=10).to(device)
    model = model.to(memory_format=torch.channels_last)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
    parts = [LinearLR(optimizer, 0.1, total_iters=1), CosineAnnealingLR(optimizer, max(1, options.epochs - 1))]
    schedule = SequentialLR(optimizer, parts, milestones=[1])
    blocker = halfway.ForwardBlocker(model, at=options.at, prune_ratio=0.4)
    for epoch in range(options.epochs):
        blocker.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device, memory_format=torch.channels_last), y.to(device)
            x, y = blocker(x, y)  # after mixing, moving and laying out, right before the model
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update_parameters(model)
        schedule.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")
    print(blocker.stats)


if __name__ == "__main__":
    main()
