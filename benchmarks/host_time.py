"""What blocking costs on the host: microseconds per operation, in the blocker's call and in the replayed call.

    python benchmarks/host_time.py [--layers 100] [--rounds 41]

The shallow part is a chain of tiny layers (16 x 16), so that hardly anything but host time is left: on a GPU this is
what launches have to hide. Plain forward passes of N and of S samples, the blocker's call and the replayed call of the
model are timed in turn; what counts is the difference to the plain pass, divided by the number of operations. One
thread; run it while nothing else runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import halfway
from halfway.lab.environment import environment

SIZE, RATIO = 8, 0.5
KINDS: dict[str, Callable[[], nn.Module]] = {
    "matrix products (recorded)": lambda: nn.Linear(16, 16),
    "cheap operations (run twice)": lambda: nn.Tanh(),
}


def milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def measure(make: Callable[[], nn.Module], layers: int, rounds: int) -> tuple[list[float], list[float]]:
    """Microseconds per layer that the blocker's call and the replayed call add, for each round."""
    model = nn.Sequential(*(make() for _ in range(layers)), nn.Identity(), nn.Linear(16, 2)).train()
    blocker = halfway.ForwardBlocker(model, str(layers), RATIO, selector=halfway.Density(num_centroids=4))
    x = torch.randn(SIZE, 16)
    part = x[: len(x) // 2].clone()
    retained = [x]

    def block() -> None:
        retained[0] = blocker(x)

    probe, replay = [], []
    for i in range(rounds + 5):
        plain_all, blocked = milliseconds(lambda: model(x)), milliseconds(block)
        replayed, plain_part = milliseconds(lambda: model(retained[0])), milliseconds(lambda: model(part))
        if i >= 5:
            probe.append(1e3 * (blocked - plain_all) / layers)
            replay.append(1e3 * (replayed - plain_part) / layers)
    stats = blocker.stats
    assert stats.steps_recomputed == 0, stats.recompute_reasons
    return probe, replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=100, help="operations before the cut (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=41, help="timed steps of each kind (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(environment(torch.device("cpu")))
    print(f"{arguments.layers} operations, {SIZE} samples, {arguments.rounds} rounds: added microseconds per operation")
    for name, make in KINDS.items():
        for where, values in zip(
            ("blocker's call", "replayed call"), measure(make, arguments.layers, arguments.rounds), strict=True
        ):
            low, middle, high = statistics.quantiles(values, n=4)
            print(f"{name:30} {where:15} median {middle:6.1f}  quartiles {low:.1f}-{high:.1f}")


if __name__ == "__main__":
    main()
