"""How long coreset methods take to choose, and how much memory: on 10,000, 20,000 and 50,000 samples.

    python benchmarks/coresets.py && python benchmarks/page.py

The choice alone, without the trainings that it goes by. Samples are made up: ten classes, 512 features, each class a
cloud of its own, and the logits of a linear layer that mostly knows them. Each choice is made in a process of its own,
whose peak memory is that of the whole process, PyTorch and the evidence included. From the last two sizes follows a
power of N. Greedy methods choose within each class, so that the size of the classes matters: how long ImageNet would
take, a thousand classes of 1,281 samples, follows from the first two sizes, with classes of 1,000 and 2,000. Run it
while nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from halfway import coresets
from halfway.coresets import Checkpoint, Dynamics, Evidence, ShortRun
from halfway.lab.environment import environment
from halfway.lab.files import write_json
from halfway.lab.progress import Bar

RESULT = Path(__file__).parent / "results" / "coresets.json"
SIZES = (10_000, 20_000, 50_000)
CLASSES, FEATURES, KEEP = 10, 512, 0.5
IMAGENET_CLASSES, IMAGENET_CLASS = 1000, 1281  # samples of each
_EPOCHS, _SHORT_RUNS, _CHECKPOINTS = 3, 10, 10


def made_up(size: int) -> Evidence:
    """All pieces of evidence about so many samples."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    labels_N = torch.arange(size) % CLASSES
    features_ND = (normal(CLASSES, FEATURES)[labels_N] + 2 * normal(size, FEATURES)).relu_()
    # A linear layer whose rows are the means of the classes.
    means_CD = torch.stack([features_ND[labels_N == c].mean(0) for c in range(CLASSES)])
    logits_NC = (features_ND - means_CD.mean(0)) @ (means_CD - means_CD.mean(0)).T / 10
    dynamics = Dynamics(size)
    for _ in range(_EPOCHS):
        dynamics.observe(torch.arange(size), logits_NC + normal(size, CLASSES), labels_N)
    offered_N = torch.full((size,), 100)
    return Evidence(
        labels_N,
        CLASSES,
        features_ND,
        logits_NC,
        dynamics,
        [ShortRun(*normal(3, size).abs()) for _ in range(_SHORT_RUNS)],
        [Checkpoint(0.1, normal(size), normal(size).square()) for _ in range(_CHECKPOINTS)],
        offered_N,
        (offered_N * torch.rand(size, generator=generator)).long(),
    )


def measure(name: str, size: int) -> dict[str, Any]:
    """Seconds and MiB of one choice."""
    method, evidence = coresets.make(name), made_up(size)
    begin = time.perf_counter()
    chosen = method.choose(evidence, KEEP)
    seconds = time.perf_counter() - begin
    assert len(chosen.ids) == round(KEEP * size)
    return {"seconds": seconds, "mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def power_of(figures: dict[int, dict[str, Any]], sizes: Sequence[int]) -> float:
    """With which power of N the seconds grow between two sizes."""
    before, after = (figures[n]["seconds"] for n in sizes)
    return math.log(after / before) / math.log(sizes[1] / sizes[0])


def for_imagenet(figures: dict[int, dict[str, Any]], sizes: Sequence[int]) -> float:
    """Seconds, if each of its classes takes what one of that size takes here."""
    of_a_class, size = figures[sizes[0]]["seconds"] / CLASSES, sizes[0] / CLASSES
    return IMAGENET_CLASSES * of_a_class * (IMAGENET_CLASS / size) ** power_of(figures, sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(coresets.METHODS), metavar="METHOD", help="only these")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    names = arguments.only or list(coresets.METHODS)
    known = json.loads(arguments.out.read_text())["methods"] if arguments.only and arguments.out.exists() else {}
    context = multiprocessing.get_context("spawn")
    with Bar(len(names) * len(arguments.sizes), "coresets", "choice") as bar:
        for name in names:
            figures = {}
            for size in arguments.sizes:
                with context.Pool(1) as pool:
                    figures[size] = pool.apply(measure, (name, size))
                bar.say(f"{name}, {size}: {figures[size]['seconds']:.2f} s, {figures[size]['mebibytes']:.0f} MiB")
                bar.update()
            sizes = sorted(figures)
            seconds = for_imagenet(figures, sizes[:2])
            known[name] = {"sizes": figures, "power": power_of(figures, sizes[-2:]), "imagenet_seconds": seconds}
    command = "python benchmarks/coresets.py"
    about = {"title": "coresets", "command": command, "seed": 0, **environment(torch.device("cpu"))}
    shape = {"classes": CLASSES, "features": FEATURES, "keep": KEEP}
    write_json(arguments.out, {**about, **shape, "methods": {n: known[n] for n in coresets.METHODS if n in known}})


if __name__ == "__main__":
    main()
