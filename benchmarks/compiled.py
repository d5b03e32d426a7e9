"""What a compiled training step costs: `python benchmarks/compiled.py`, while nothing else runs. Needs a C++ compiler.

Five ways to take a step, each on its own copy of one model:

- eager, full: all N samples, nothing compiled;
- eager, replay: the blocker, nothing compiled;
- compiled, full: `torch.compile(model)`, all N samples;
- compiled, recompute: `torch.compile(model)` and the blocker. Nothing can be replayed: the shallow layers run eagerly
  on all N samples, then compiled on the S retained ones;
- compiled, replay: `halfway.compile(model, at=...)` and the blocker. The shallow layers run eagerly, once, and are
  replayed; what comes after the cut is compiled.

FLOPs are counted in a steady step, with the compiled parts run eagerly: it is the same operations. Wall time is
measured in rounds of one step of each way, in rotating order, and divided by that round's step of "eager, full" and of
"compiled, full". Compilation is over by then; its seconds are in those of the warm-up steps.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import halfway
import page
from halfway import ForwardBlocker
from halfway.engine.flops import FlopCounter
from halfway.lab.bench.measure import Clock, Step, interleaved, quartiles
from halfway.lab.bench.steps import train
from halfway.lab.environment import environment
from halfway.lab.files import write_json
from halfway.lab.models.by_name import build, random_input

COMMAND = "python benchmarks/compiled.py"
WAYS = ("eager, full", "eager, replay", "compiled, full", "compiled, recompute", "compiled, replay")
# The first calls of a blocked model prove, watch and compile.
_WARM_UP = 5

CASES: dict[str, tuple[str, Callable[[], nn.Module], str]] = {
    "resnet50": ("ResNet-50", lambda: build("resnet50"), "layer2"),
    "vit_small": ("ViT-S/16", lambda: build("vit_small_patch16_224", size=96), "blocks.2"),
    "tiny": ("three layers", lambda: _tiny(), "0"),  # to try this script
}


def compare(
    model: nn.Module, at: str, x: Tensor, prune_ratio: float, rounds: int, backend: str, progress: str | None
) -> dict[str, Any]:
    """Measure the five ways on one model. `x`: (N, ...) its input."""
    ways = Ways(model, at, x, prune_ratio, backend)
    warm_up = {}
    for way, step in ways.steps.items():
        begin = time.perf_counter()
        for _ in range(_WARM_UP):
            step()
        warm_up[way] = time.perf_counter() - begin
    flops = {way: _flops(step) for way, step in ways.steps.items()}
    taken = interleaved(ways.steps, rounds, Clock(x.device), progress)
    seconds = {way: [step.total for step in each] for way, each in taken.items()}
    ways.check()

    def relative(way: str, to: str) -> dict[str, float]:
        return quartiles([a / b for a, b in zip(seconds[way], seconds[to], strict=True)])

    return {
        "cut": at,
        "input": list(x.shape),
        "retained": ways.retained,
        "prune_ratio": prune_ratio,
        "backend": backend,
        "rounds": rounds,
        "regions": ways.regions,
        "ways": {
            way: {
                "flops": flops[way] / flops["eager, full"],
                "wall": relative(way, "eager, full"),
                "wall_to_compiled": relative(way, "compiled, full"),
                "seconds": statistics.median(seconds[way]),
                "warm_up_seconds": warm_up[way],
            }
            for way in WAYS
        },
    }


class Ways:
    """A step in each way.

    Attributes:
        steps: by way.
    """

    def __init__(self, model: nn.Module, at: str, x: Tensor, prune_ratio: float, backend: str) -> None:
        plain, replaying, full, recomputing, deep = (copy.deepcopy(model) for _ in WAYS)
        options: dict[str, Any] = {"backend": backend, "dynamic": False}
        self._deep = halfway.compile(deep, at, **options)
        whole, recomputed = torch.compile(full, **options), torch.compile(recomputing, **options)
        self._eager = ForwardBlocker(replaying, at, prune_ratio, reuse="replay")
        self._recompute = ForwardBlocker(recomputed, at, prune_ratio, reuse="recompute")
        self._replay = ForwardBlocker(self._deep, at, prune_ratio, reuse="replay")
        self.steps: dict[str, Step] = {
            "eager, full": lambda: train(plain, x),
            "eager, replay": lambda: train(replaying, x, self._eager),
            "compiled, full": lambda: train(whole, x),
            "compiled, recompute": lambda: train(recomputed, x, self._recompute),
            "compiled, replay": lambda: train(self._deep, x, self._replay),
        }

    @property
    def retained(self) -> int:
        assert self._replay.last is not None
        return len(self._replay.last.indices)

    @property
    def regions(self) -> list[str]:
        """The modules that `halfway.compile` compiled."""
        return [name for name, module in self._deep.named_modules() if module._compiled_call_impl is not None]

    def check(self) -> None:
        """Raise if a way did not do what it is named after."""
        for blocker in (self._eager, self._replay):
            stats = blocker.stats
            assert stats.steps_replayed == stats.steps, stats.recompute_reasons
        assert self._recompute.stats.steps_recomputed == self._recompute.stats.steps
        assert self.regions, "nothing was compiled"


def _flops(step: Step) -> float:
    """The cheaper of two steps: now and then a replayed step computes one operation again, as a check."""
    counts = []
    for _ in range(2):
        with torch.compiler.set_stance("force_eager"), FlopCounter() as counter:
            step()
        counts.append(counter.total)
    return min(counts)


def _tiny() -> nn.Module:
    def stage(channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    return nn.Sequential(stage(3), stage(8), stage(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = ["resnet50", "vit_small"]
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=models, metavar="MODEL", help="only these")
    parser.add_argument("--batch", type=int, default=32, help="samples (default: %(default)s)")
    parser.add_argument("--size", type=int, default=96, help="pixels (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=21, help="of each way (default: %(default)s)")
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=page.RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    options = " ".join(f"--{name} {getattr(arguments, name)}" for name in ("batch", "size", "rounds", "backend"))
    command = f"{COMMAND} {options} --only {' '.join(arguments.only)}"
    found: dict[str, Any] = {"title": "Compiled", "seed": 0, "command": command, "models": []}
    for key in arguments.only:
        title, make, at = CASES[key]
        torch._dynamo.reset()
        torch.manual_seed(0)
        x = random_input((arguments.batch, 3, arguments.size, arguments.size))
        measured = compare(make().train(), at, x, 0.4, arguments.rounds, arguments.backend, title)
        found["models"].append({"title": title, **measured})
        found.update(environment(x.device))
        write_json(arguments.out / "compiled.json", found)
        for way, each in measured["ways"].items():
            print(f"{title}, {way}: FLOPs {each['flops']:.3f}, wall {each['wall']['median']:.3f}", flush=True)
        gc.collect()
    page.write(arguments.out)


if __name__ == "__main__":
    main()
