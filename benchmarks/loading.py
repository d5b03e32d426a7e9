"""What pruning before loading saves where loading is the bottleneck: JPEG files, augmentation, a small network.

    python benchmarks/loading.py [--images 512] [--rounds 5] [--workers 2] && python benchmarks/page.py

Four ways of training an epoch, in rotating order, and the time of each relative to the round's full epoch: all samples;
`PrunedBatchSampler` with random pruning; `ForwardBlocker` with random pruning, which loads what it prunes; and RS2,
which prunes whole epochs. Images are drawn, not photographs: 224 px, written as JPEG into a temporary folder. They are
decoded, cropped, jittered and blurred at 224 px, as for contrastive learning, and trained on at 32 px, so that loading
takes most of the time. What is counted beside the clock is how many images were decoded.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.models import resnet18

import halfway
from halfway.lab.bench.measure import quartiles
from halfway.lab.environment import environment
from halfway.lab.files import write_json
from halfway.lab.progress import Bar

RESULT = Path(__file__).parent / "results" / "loading.json"
BATCH, RATIO, CLASSES = 64, 0.5, 10
WAYS = ("full", "PrunedBatchSampler", "ForwardBlocker", "rs2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=512, help="JPEG files (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="epochs of each way (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="of the data loaders (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    with tempfile.TemporaryDirectory() as folder:
        data = Pictures(Path(folder), arguments.images)
        epochs = {way: way_of(way, data, arguments.workers) for way in WAYS}
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        decoded: dict[str, int] = {}
        with Bar((arguments.rounds + 1) * len(WAYS), "epochs", "epoch") as bar:
            for round_ in range(arguments.rounds + 1):
                turn = round_ % len(WAYS)
                for way in WAYS[turn:] + WAYS[:turn]:
                    before, begin = int(data.decoded), time.perf_counter()
                    epochs[way](round_)
                    if round_:  # the first one warms up
                        seconds[way].append(time.perf_counter() - begin)
                        decoded[way] = int(data.decoded) - before
                    bar.update()
    result = {
        "command": f"python benchmarks/loading.py --images {arguments.images} --rounds {arguments.rounds}"
        f" --workers {arguments.workers}",
        "title": "pruning before loading",
        "seed": 0,
        "threads": 1,
        "images": arguments.images,
        "batch_size": BATCH,
        "prune_ratio": RATIO,
        "workers": arguments.workers,
        "rounds": arguments.rounds,
        "full_epoch_seconds": quartiles(seconds["full"]),
        "ways": {
            way: {
                "decoded": decoded[way],
                "relative": quartiles([a / b for a, b in zip(seconds[way], seconds["full"], strict=True)]),
            }
            for way in WAYS
        },
        **environment(torch.device("cpu")),
    }
    write_json(arguments.out, result)
    for way, found in result["ways"].items():
        print(f"{way}: {found['decoded']} decoded, {found['relative']['median']:.3f} of a full epoch")


class Pictures(Dataset):
    """JPEG files of 224 px in a folder.

    Attributes:
        decoded: how many were decoded so far, by all workers.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.paths = [folder / f"{i}.jpg" for i in range(count)]
        self.decoded = torch.zeros((), dtype=torch.int64).share_memory_()
        self._counting = torch.multiprocessing.get_context("fork").Lock()
        self._augmented = transforms.Compose(
            [
                transforms.RandomResizedCrop(224),
                transforms.RandomHorizontalFlip(),
                transforms.ColorJitter(0.8, 0.8, 0.8, 0.2),
                transforms.GaussianBlur(23),
                transforms.Resize(32),
                transforms.ToTensor(),
            ]
        )
        generator = torch.Generator().manual_seed(0)
        for path in self.paths:
            coarse = torch.rand(1, 3, 14, 14, generator=generator)
            pixels = F.interpolate(coarse, 224, mode="bilinear")[0].permute(1, 2, 0).mul(255).to(torch.uint8)
            Image.fromarray(pixels.numpy()).save(path, quality=90)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Any:
        with self._counting:
            self.decoded += 1
        return self._augmented(Image.open(self.paths[i]).convert("RGB")), i % CLASSES


def way_of(way: str, data: Pictures, workers: int) -> Callable[[int], None]:
    """A function that trains an epoch."""
    torch.manual_seed(0)
    model = resnet18(num_classes=CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    blocker = batches = sampler = None
    if way == "PrunedBatchSampler":
        batches = halfway.PrunedBatchSampler(data, BATCH, RATIO, selector="random")
        loader = DataLoader(data, batch_sampler=batches, **options)
    elif way == "rs2":
        sampler = halfway.samplers.RS2(data, RATIO)
        loader = DataLoader(data, BATCH, sampler=sampler, **options)
    else:
        loader = DataLoader(data, BATCH, shuffle=True, **options)
        blocker = halfway.ForwardBlocker(model, None, RATIO, selector="random") if way == "ForwardBlocker" else None

    def epoch(number: int) -> None:
        for scheduled in (blocker, batches, sampler):
            if scheduled is not None:
                scheduled.set_epoch(number)
        for x, y in loader:
            if blocker is not None:
                x, y = blocker(x, y)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return epoch


if __name__ == "__main__":
    main()
