"""The demo's experiment: a small ResNet on real digits, trained on everything, on random halves, and with PFB.

What makes the comparison fair is in this file:

- At a given seed every method starts from the same weights and sees the same batches with the same augmentation:
  `make_model` depends on the seed alone, `epoch_batches` on (seed, epoch) alone.
- The methods advance together, epoch by epoch, in rotating order, so that a busy moment of the machine does not fall
  on one of them only, and each pruned epoch is timed against the full one beside it.
- The accuracy that counts is the last epoch's. Nothing is picked by looking at the test images.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...blocker.blocker import ForwardBlocker
from ...schedule import Schedule

METHODS = ("full", "random", "pfb")
CUT = "layer1"
SIZE = 32
TRAIN_IMAGES = 1200
BATCH_SIZE = 100
# Chosen for time: a run of all methods and seeds should take two minutes on two cores, and a step should still be
# long enough for its arithmetic, not the interpreter, to decide how long it takes.
WIDTH = 24
PEAK_LEARNING_RATE = 0.05
MAX_SHIFT = 3
NOISE = 0.3


@dataclass(frozen=True)
class Settings:
    """What the command's options say."""

    prune_ratio: float = 0.5
    seeds: int = 3
    epochs: int = 10

    def __post_init__(self) -> None:
        if not 0.05 <= self.prune_ratio <= 0.9:
            raise ValueError(
                f"--prune-ratio is the share of each batch to prune and must be in [0.05, 0.9], got {self.prune_ratio}"
            )
        if self.seeds < 1:
            raise ValueError(f"--seeds is the number of repetitions and must be at least 1, got {self.seeds}")
        if self.epochs < 3:
            raise ValueError(
                f"--epochs must be at least 3, got {self.epochs}: the first and the last see all data, so that fewer "
                "would leave none to prune in"
            )

    @property
    def schedule(self) -> Schedule:
        """Like the paper, all data in the first and last epochs: a tenth of the run at each end, at least one."""
        margin = max(1, round(self.epochs / 10))
        return Schedule(margin, self.epochs - margin)


@dataclass(frozen=True)
class Digits:
    """Images (N, 1, 32, 32), normalised for the model, and labels (N,); `pixels` (N, 32, 32) uint8 are to look at."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    pixels: Tensor


def load_digits() -> Digits:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 px, enlarged to 32 px; the same stratified split for everyone."""
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    data = load()
    labels = torch.from_numpy(data.target).long()
    small = torch.from_numpy(data.images).float().unsqueeze(1) / 16
    images = F.interpolate(small, size=(SIZE, SIZE), mode="bilinear")
    rows = train_test_split(range(len(labels)), train_size=TRAIN_IMAGES, stratify=data.target, random_state=0)
    train, test = (torch.tensor(r) for r in rows)
    std, mean = torch.std_mean(images[train])
    normalised = (images - mean) / std
    pixels = (images[train, 0] * 255).round().to(torch.uint8)
    return Digits(normalised[train], labels[train], normalised[test], labels[test], pixels)


def epoch_batches(digits: Digits, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(images, labels, ids) of one epoch: order and augmentation are a function of (seed, epoch) alone."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    for ids in torch.randperm(len(digits.train_labels), generator=generator).split(BATCH_SIZE):
        yield augment(digits.train_images[ids], generator), digits.train_labels[ids], ids


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image (B, 1, H, W) by up to `MAX_SHIFT` px in each direction and add a little noise."""
    B, _, H, W = images.shape
    background = float(images.min())
    padded = F.pad(images, (MAX_SHIFT,) * 4, value=background)
    down, right = torch.randint(0, 2 * MAX_SHIFT + 1, (2, B, 1, 1), generator=generator)
    rows = down + torch.arange(H)[:, None]
    columns = right + torch.arange(W)
    shifted = padded[torch.arange(B)[:, None, None], 0, rows, columns].unsqueeze(1)
    return shifted + NOISE * torch.randn(shifted.shape, generator=generator)


def make_model(seed: int) -> nn.Module:
    """A ResNet of torchvision's basic blocks, (1, 2, 2, 2) per stage, with a stem for small images.

    One block before the cut and six after it: the probe that PFB pays for pruned samples stays small.
    """
    from torchvision.models.resnet import BasicBlock

    # There are a dozen batches per epoch; the usual momentum of 0.1 would let evaluation lag behind by one.
    norm = partial(nn.BatchNorm2d, momentum=0.3)
    width = WIDTH

    def stage(channels: int) -> nn.Sequential:
        project = nn.Sequential(nn.Conv2d(channels, 2 * channels, 1, stride=2, bias=False), norm(2 * channels))
        return nn.Sequential(
            BasicBlock(channels, 2 * channels, 2, project, norm_layer=norm),
            BasicBlock(2 * channels, 2 * channels, norm_layer=norm),
        )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False),
                bn1=norm(width),
                relu=nn.ReLU(),
                layer1=BasicBlock(width, width, norm_layer=norm),
                layer2=stage(width),
                layer3=stage(2 * width),
                layer4=stage(4 * width),
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                fc=nn.Linear(8 * width, 10),
            )
        )


@dataclass
class Record:
    """What one run measured.

    accuracy: on the test images, after each epoch.
    seconds: of training, each epoch, evaluation left out.
    flops: spent until the end of each epoch, in epochs of full training.
    pruned_share: of the samples in the epochs that prune, and in all of them.
    offered, retained: (N,) per training image: how often it was in a pruned batch, and how often it stayed there.
    steps_replayed, recompute_reasons: how PFB's shallow activations were reused.
    """

    method: str
    seed: int
    offered: Tensor
    retained: Tensor
    accuracy: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    pruned_share: tuple[float, float] = (0.0, 0.0)
    steps_replayed: int = 0
    recompute_reasons: dict[str, int] = field(default_factory=dict)


class Run:
    """One method at one seed: trains an epoch at a time and keeps its `record`."""

    def __init__(self, method: str, seed: int, settings: Settings, digits: Digits) -> None:
        self.digits = digits
        self.schedule = settings.schedule
        self.model = make_model(seed)
        self.blocker = make_blocker(method, self.model, settings, seed)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), PEAK_LEARNING_RATE, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
        steps = settings.epochs * -(-len(digits.train_labels) // BATCH_SIZE)
        self.learning_rate = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, PEAK_LEARNING_RATE, total_steps=steps)
        nobody = torch.zeros(len(digits.train_labels), dtype=torch.long)
        self.record = Record(method, seed, offered=nobody, retained=nobody.clone())

    def epoch(self, epoch: int) -> None:
        """Train one epoch, time it, and evaluate."""
        self.model.train()
        start = time.perf_counter()
        if self.blocker is not None:
            self.blocker.set_epoch(epoch)
        for x, y, ids in epoch_batches(self.digits, self.record.seed, epoch):
            self.step(x, y, ids)
        self.record.seconds.append(time.perf_counter() - start)
        self.record.accuracy.append(accuracy(self.model, self.digits))
        self._note_cost()

    def step(self, x: Tensor, y: Tensor, ids: Tensor) -> None:
        if self.blocker is not None:
            x, y = self.blocker(x, y, ids=ids)
            if self.blocker.last is not None:
                self.record.offered[ids] += 1
                self.record.retained[ids[self.blocker.last.indices]] += 1
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.learning_rate.step()

    def _note_cost(self) -> None:
        record = self.record
        if self.blocker is None:
            record.flops.append(float(len(record.accuracy)))
            return
        stats = self.blocker.stats
        record.flops.append(stats.relative_flops * stats.samples_seen / len(self.digits.train_labels))
        offered, retained = int(record.offered.sum()), int(record.retained.sum())
        record.pruned_share = (1 - retained / offered if offered else 0.0, stats.effective_ratio)
        record.steps_replayed, record.recompute_reasons = stats.steps_replayed, stats.recompute_reasons


def make_blocker(method: str, model: nn.Module, settings: Settings, seed: int) -> ForwardBlocker | None:
    """The blocker of a method; none for full data, which is the plain loop."""
    if method == "full":
        return None
    at, selector = (CUT, "density") if method == "pfb" else (None, "random")
    return ForwardBlocker(
        model, at, settings.prune_ratio, selector=selector, schedule=settings.schedule, reuse="auto", seed=seed
    )


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """The share of the test images that the model names correctly."""
    model.eval()
    right = sum(
        int((model(x).argmax(1) == y).sum())
        for x, y in zip(digits.test_images.split(200), digits.test_labels.split(200), strict=True)
    )
    return right / len(digits.test_labels)


def train_all(settings: Settings, digits: Digits) -> list[Record]:
    """Every method at every seed, side by side, under one progress bar."""
    from tqdm import tqdm

    records: list[Record] = []
    # A terminal is redrawn often; a log file gets a line now and then.
    interval = 0.2 if sys.stderr.isatty() else 10.0
    total = settings.seeds * settings.epochs * len(METHODS)
    with tqdm(total=total, unit="epoch", mininterval=interval, dynamic_ncols=True) as bar:
        for seed in range(settings.seeds):
            runs = [Run(method, seed, settings, digits) for method in METHODS]
            records += [run.record for run in runs]
            bar.set_description(f"seed {seed + 1}/{settings.seeds}")
            for epoch in range(settings.epochs):
                for run in rotated(runs, epoch):
                    run.epoch(epoch)
                    latest = {r.record.method: f"{r.record.accuracy[-1]:.1%}" for r in runs if r.record.accuracy}
                    bar.set_postfix(latest, refresh=False)
                    bar.update()
    return records


def rotated(runs: list[Run], by: int) -> list[Run]:
    """The runs in order, beginning with another one each time."""
    by %= len(runs)
    return runs[by:] + runs[:by]
