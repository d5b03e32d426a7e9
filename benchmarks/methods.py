"""What a step costs with each method, beside the limit, and the paper's Table 3 at a reduced scale.

    python benchmarks/methods.py [--rounds 15] [--size 96] [--batch 32]

ResNet-50 cut after layer2, p = 0.4, random images and labels. In every round each method takes one pruned step (choice,
forward, loss, backward; no optimizer) on the same batch, in rotating order, and is divided by that round's step of full
data. FLOPs are counted. *Overhead* is what a method adds to training, measured inside the same steps: choosing,
learning, and losses per sample that nothing else needs. The passes that a choice needs (the shallow layers, or the
whole forward) count as training, as in the paper.

A method that decides before the epoch takes whole steps, and fewer of them: its step counts 1 - p times. Its decision,
for the 1,281,167 samples of ImageNet, is timed apart and spread over an epoch of them at the speed of the full step.

Run it while nothing else runs.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from halfway import ForwardBlocker, Schedule
from halfway.engine.flops import FlopCounter
from halfway.lab.bench.measure import quartiles
from halfway.lab.environment import environment
from halfway.lab.files import write_json, write_whole
from halfway.lab.models.by_name import build
from halfway.lab.recipes import methods
from halfway.samplers import EpochSampler
from halfway.tables import markdown

RESULTS = Path(__file__).parent / "results"
RATIO, CUT, IMAGENET = 0.4, "layer2", 1_281_167
# The paper's window for ResNet-50, as a share of the run, and the methods of its Table 3 (EL2N decides once).
WINDOW = Schedule(5, 80).share(90)
TABLE_3 = {"full": "Full data", "ucb": "UCB", "infobatch_dagger": "InfoBatch†", "divbs": "DivBS", "pfb": "PFB"}
# Variants that cost what their namesakes do, and the InfoBatch whose ratio is only known from a training.
LEFT_OUT = ("loss_rank", "last_loss_hard", "infobatch")
WARM_UP = 2


class Timed:
    """Adds up the time of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return call


class Stepper:
    """One method's steps on one batch. `scale`: how many of them there are, relative to full data."""

    def __init__(self, name: str, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self.name, self.model, self.x, self.y = name, copy.deepcopy(model), x, y
        self.ids = torch.arange(len(x))
        self.clock = Timed()
        self.blocker: ForwardBlocker | None = None
        self.sampler: EpochSampler | None = None
        self.scale = 1.0
        if name in ("full", "limit"):
            return
        method = methods.find(name)
        if method.before_epoch:
            self.sampler = method.sampler(len(x), RATIO, {})
            self.sampler.set_epoch(0)
            self.scale = 1 - RATIO * method.preset.get("threshold", 1.0)
            return
        selector = method.selector({}, num_samples=len(x))
        for part in ("select", "learn", "note", "observe"):
            setattr(selector, part, self.clock.wrap(getattr(selector, part)))
        at = CUT if selector.needs == "features" else None
        self.blocker = ForwardBlocker(self.model, at, RATIO, selector=selector, reuse="replay")

    def step(self) -> tuple[float, float]:
        """Seconds in all, and of overhead."""
        self.model.zero_grad()
        self.clock.seconds = 0.0
        begin = time.perf_counter()
        x, y, weights = self.x, self.y, None
        if self.name == "limit":
            count = len(x) - round(RATIO * len(x))
            x, y = x[:count], y[:count]
        if self.blocker is not None:
            x, y = self.blocker(x, y, ids=self.ids)
            weights = self.blocker.last.weights if self.blocker.last is not None else None
        losses = F.cross_entropy(self.model(x), y, reduction="none")
        if self.blocker is not None:
            self.blocker.observe(losses)
        if self.sampler is not None:
            self.clock.wrap(self.sampler.observe)(self.ids, losses)
            if self.sampler.reweights:
                weights = self.clock.wrap(self.sampler.weights)(self.ids)
        (losses if weights is None else weights * losses).mean().backward()
        return time.perf_counter() - begin, self.clock.seconds

    def flops(self) -> float:
        """Of a steady step: the lesser of two, since every 16th computes something again."""
        found = []
        for _ in range(2):
            with FlopCounter() as counter:
                self.step()
            found.append(counter.total)
        return min(found) * self.scale


def decision_seconds(name: str) -> float:
    """Of one epoch's choice among as many samples as ImageNet has: the median of three."""
    sampler = methods.find(name).sampler(IMAGENET, RATIO, {})
    generator = torch.Generator().manual_seed(0)
    sampler.set_epoch(0)
    taken = []
    for epoch in range(1, 4):
        sampler.observe(torch.arange(IMAGENET), torch.rand(IMAGENET, generator=generator))
        begin = time.perf_counter()
        sampler.set_epoch(10 * epoch)  # a new period for those that decide every ten epochs
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All methods, side by side."""
    torch.manual_seed(0)
    model = build("resnet50").train()
    x = torch.randn(arguments.batch, 3, arguments.size, arguments.size)
    y = torch.randint(1000, (arguments.batch,))
    names = ["full", "limit", *(name for name in methods.comparable()[1:] if name not in LEFT_OUT)]
    steppers = {name: Stepper(name, model, x, y) for name in names}
    flops = {}
    for name, stepper in tqdm(steppers.items(), "counting FLOPs", unit="method"):
        for _ in range(WARM_UP):
            stepper.step()
        flops[name] = stepper.flops()
        stepper.model.zero_grad()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with tqdm(total=arguments.rounds * len(names), desc="timing", unit="step") as bar:
        for i in range(arguments.rounds):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                taken[name].append(steppers[name].step())
                steppers[name].model.zero_grad()
                bar.update()
    full = [seconds for seconds, _ in taken["full"]]
    epoch_seconds = statistics.median(full) / arguments.batch * IMAGENET
    rows = {}
    for name, stepper in steppers.items():
        decision = decision_seconds(name) if stepper.sampler is not None else 0.0
        apart = decision / epoch_seconds
        wall = [stepper.scale * s / f + apart for (s, _), f in zip(taken[name], full, strict=True)]
        overhead = [stepper.scale * o / f + apart for (_, o), f in zip(taken[name], full, strict=True)]
        rows[name] = {
            "flops": flops[name] / flops["full"],
            "wall": quartiles(wall),
            "overhead": quartiles(overhead),
            "decision_seconds": decision,
        }
    return {
        "command": f"python benchmarks/methods.py --rounds {arguments.rounds}",
        "model": "resnet50",
        "cut": CUT,
        "prune_ratio": RATIO,
        "input": list(x.shape),
        "retained": len(x) - round(RATIO * len(x)),
        "rounds": arguments.rounds,
        "full_step_seconds": statistics.median(full),
        "methods": rows,
        **environment(torch.device("cpu")),
    }


def page(result: dict[str, Any]) -> str:
    """The tables, as Markdown."""
    rows = result["methods"]
    machine = result["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    lines = [
        "# What each method costs",
        "",
        f"One pruned step at p = {RATIO} relative to full data: ResNet-50, cut after `{CUT}`, random images of "
        f"{result['input'][2]} px, batch {result['input'][0]} ({result['retained']} retained), seed 0, median "
        f"[quartiles] of {result['rounds']} interleaved rounds. `{result['command']}`, {result['date']}, "
        f"{machine['cpu']}, {machine['cores']} cores, {result['threads']} threads; {versions}.",
        "",
    ]
    cells = []
    for name, row in sorted(rows.items(), key=lambda item: (item[1]["flops"], item[1]["wall"]["median"])):
        wall = row["wall"]
        spread = f"{wall['median']:.3f} [{wall['q1']:.3f}, {wall['q3']:.3f}]"
        cells.append([name, f"{row['flops']:.3f}", spread, f"{row['overhead']['median']:.4f}"])
    lines += [
        markdown(["method", "FLOPs", "wall", "of it overhead"], cells),
        "",
        "*limit*: training on the retained samples alone, chosen for nothing. Samplers (infobatch_dagger, ucb, "
        "epsilon_greedy, dyn_unc, rs2, random_subset) take whole steps but fewer; InfoBatch† prunes 0.95 p. Overhead: "
        "choosing, learning, and an epoch's decision among ImageNet's samples.",
        "",
        "## The paper's Table 3, at a reduced scale",
        "",
        f"The same steps, as a run that prunes in the paper's window (epochs 5-80 of 90, {WINDOW:.1%} of it), in "
        "units of the training on full data. Beside it what the paper reports for its machine and full-size images.",
        "",
    ]
    cells = []
    paper = {"full": "", "ucb": "26.7%", "infobatch_dagger": "26.8%", "divbs": "14.4%", "pfb": "33.2%"}
    for name, title in TABLE_3.items():
        total = WINDOW * rows[name]["wall"]["median"] + 1 - WINDOW
        overhead = WINDOW * rows[name]["overhead"]["median"]
        reduction = "" if name == "full" else f"{1 - total:.1%}"
        cells.append([title, f"{total - overhead:.3f}", f"{overhead:.4f}", f"{total:.3f}", reduction, paper[name]])
    header = ["method", "training", "overhead", "total", "reduction", "paper: reduction"]
    return "\n".join([*lines, markdown(header, cells)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="steps of each method (default: %(default)s)")
    parser.add_argument("--size", type=int, default=96, help="of the images (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="samples (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of methods.json and methods.md")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds must be at least 2, to have quartiles")
    result = measure(arguments)
    write_json(arguments.out / "methods.json", result)
    write_whole(arguments.out / "methods.md", page(result))
    print(page(result))


if __name__ == "__main__":
    main()
