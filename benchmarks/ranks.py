"""What the sum over ranks costs: `torchrun --nproc-per-node 2 benchmarks/ranks.py`.

The one all-reduce per step (64 centroids of 128 dimensions, with their counts) is timed alone, with all ranks at the
same line, and compared to a DDP training step of ResNet-50 with halfway on as many processes.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from halfway import ForwardBlocker
from halfway.lab.bench import steps as bench
from halfway.lab.bench.measure import Clock, quartiles
from halfway.lab.environment import environment
from halfway.lab.files import write_json
from halfway.lab.models.by_name import build
from halfway.state.ranks import Ranks

RESULT = Path(__file__).parent / "results" / "ranks.json"
COMMAND = "torchrun --nproc-per-node 2 benchmarks/ranks.py"


def main() -> None:
    """Measure on all ranks, write on the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    device = torch.device("cpu")
    clock, ranks = Clock(device), Ranks()
    model = DistributedDataParallel(build("resnet50").train())
    blocker = ForwardBlocker(model, "layer2", 0.4)
    x, packed = torch.randn(32, 3, 96, 96), torch.zeros(64, 129)
    for _ in range(2):
        bench.train(model, x, blocker)
    sums, steps = [], []

    def add_up() -> None:
        ranks.sum(packed).wait()

    for _ in range(arguments.rounds):
        dist.barrier()
        sums.append(clock.time(add_up).total)
        steps.append(clock.time(lambda: bench.train(model, x, blocker)).total)
    if dist.get_rank() == 0:
        result = {
            "ranks": dist.get_world_size(),
            "bytes": packed.numel() * packed.element_size(),
            "rounds": arguments.rounds,
            "milliseconds": {k: 1000 * v for k, v in quartiles(sums).items()},
            "step_seconds": statistics.median(steps),
            "relative": statistics.median(sums) / statistics.median(steps),
            "replayed": blocker.stats.steps_replayed,
        }
        write_json(arguments.out, {"command": COMMAND, **environment(device), **result})
        print(result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
