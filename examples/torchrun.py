"""DDP by hand, killed and resumed at will: torchrun --standalone --nproc-per-node 2 examples/torchrun.py."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import halfway
from digits import digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1797, help="of the 1797 digits")
    parser.add_argument("--checkpoint", type=Path, help="written after each epoch; resumed from if it is there")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if cuda else "gloo", **alone)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    net = torchvision.models.resnet18(num_classes=10).to(device)
    model = DistributedDataParallel(net, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    blocker = halfway.ForwardBlocker(model, at="layer1", prune_ratio=0.4)  # after init_process_group, on every rank
    parts, begin = {"model": net, "optimizer": optimizer, "blocker": blocker}, 0
    if options.checkpoint and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=device, weights_only=True)
        begin = saved["epoch"] + 1
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    sampler = DistributedSampler(data := digits(32, options.samples), drop_last=True)
    for epoch in range(begin, options.epochs):
        sampler.set_epoch(epoch)
        blocker.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=32, sampler=sampler, drop_last=True):
            x, y = blocker(x.to(device), y.to(device))
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0 and options.checkpoint:
            unfinished = options.checkpoint.with_suffix(".tmp")
            torch.save({"epoch": epoch, **{name: part.state_dict() for name, part in parts.items()}}, unfinished)
            unfinished.replace(options.checkpoint)  # a kill leaves the whole old one or the whole new one
    if dist.get_rank() == 0:
        print(f"epochs {begin} to {options.epochs}, {dist.get_world_size()} processes: {blocker.stats}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
