"""A loop with Accelerate and halfway: one line to make the blocker, one in the loop. Also under `accelerate launch` and
`torchrun --nproc-per-node 2`."""

from __future__ import annotations

import argparse
from itertools import cycle, islice

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from digits import digits
from halfway.integrations.accelerate import block

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--mixed-precision", default="no", choices=["no", "bf16"])
args = parser.parse_args()


def layer(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU())


torch.manual_seed(0)
accelerator = Accelerator(cpu=True, mixed_precision=args.mixed_precision, gradient_accumulation_steps=2)
model = nn.Sequential(layer(3, 16), layer(16, 32), layer(32, 64), nn.Flatten(), nn.Linear(64 * 16, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(digits(), batch_size=64, shuffle=True, drop_last=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

blocker = block(accelerator, model, at="0", prune_ratio=0.4)
for step, (x, y) in enumerate(islice(cycle(loader), args.steps)):
    with accelerator.accumulate(model):
        x, y = blocker(x, y)
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if step % 20 == 0:
        accelerator.print(f"step {step}: loss {loss.item():.3f}")

accelerator.print(blocker.stats)
accelerator.end_training()
