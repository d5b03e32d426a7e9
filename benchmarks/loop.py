"""What our own training loop costs: epochs of `halfway train` at ratio 0 beside epochs of the same loop by hand.

    python benchmarks/loop.py [--recipe tiny-cifar10] [--data data] [--rounds 15]

Ours includes everything an epoch of `halfway train` does but the evaluation: the progress bar, timers, metrics,
TensorBoard and the checkpoint. Both loops see the same batches in turn, in alternating order; only the ratio within a
round counts. The share of waiting for data (decoding and augmentation) comes from the same epochs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from halfway.lab import data
from halfway.lab.bench.measure import quartiles
from halfway.lab.environment import environment
from halfway.lab.files import write_json
from halfway.lab.progress import Bar
from halfway.lab.recipes import reading
from halfway.lab.recipes import schema as recipe
from halfway.lab.training.logs import Logs
from halfway.lab.training.loop import Training
from halfway.lab.training.order import BatchOrder
from halfway.lab.training.run_folder import RunFolder

RESULT = Path(__file__).parent / "results" / "loop.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny-cifar10", help="a classification recipe (default: %(default)s)")
    parser.add_argument("--data", default="data", help="where the data lie, or `synthetic` (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="epochs of each loop (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()

    changes = {"prune_ratio": 0.0, "length": arguments.rounds + 3, "window": [0, None], "evaluate_every": 10**6}
    r = reading.load(arguments.recipe).with_settings({**changes, "root": arguments.data})
    device = torch.device("cpu")
    loaded = data.load(r.data, r.root, device)
    with tempfile.TemporaryDirectory() as temporary:
        folder = RunFolder(temporary)
        training = Training(r, loaded, device, folder)
        by_hand = HandWritten(r, loaded)
        ratios = []
        with Logs(folder, 0) as logs, Bar(training.steps, "halfway train", "step") as bar:
            for round_ in range(arguments.rounds + 1):
                seconds = {}
                for loop in ("ours", "hand")[:: 1 if round_ % 2 else -1]:
                    begin = time.perf_counter()
                    training.train_epoch(logs, bar) if loop == "ours" else by_hand.epoch(round_)
                    seconds[loop] = time.perf_counter() - begin
                if round_:  # the first one warms up
                    ratios.append(seconds["ours"] / seconds["hand"])
        assert all(
            torch.equal(a, b) for a, b in zip(training.model.parameters(), by_hand.model.parameters(), strict=True)
        ), "the two loops do not train the same"
        waited = [m["waited"] / m["seconds"] for m in folder.read_metrics()[1:]]
    result = {
        "command": f"python benchmarks/loop.py --recipe {r.name} --rounds {arguments.rounds}",
        "recipe": r.name,
        "rounds": arguments.rounds,
        "ours_over_hand": quartiles(ratios),
        "waiting_for_data": quartiles(waited),
        **environment(device),
    }
    write_json(arguments.out, result)
    print(f"ours / by hand {result['ours_over_hand']}, share of waiting for data {result['waiting_for_data']}")


class HandWritten:
    """The loop a user would write for a classification recipe with SGD and OneCycle."""

    def __init__(self, r: recipe.Recipe, loaded: data.Data) -> None:
        self.loaded, self.smoothing = loaded, r.label_smoothing
        self.layout = torch.channels_last if r.channels_last else torch.contiguous_format
        self.model = r.network().to(memory_format=self.layout)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), r.optimizer.lr, weight_decay=r.optimizer.weight_decay, **r.optimizer.options
        )
        self.order = BatchOrder(len(loaded.train), r.batch_size, r.seed)
        steps = r.length * self.order.per_epoch
        self.policy = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, r.optimizer.lr, total_steps=steps)

    def epoch(self, epoch: int) -> None:
        self.model.train()
        for x, y, _ in self.loaded.train.batches(self.order.epoch(epoch)):
            x = x.to(memory_format=self.layout)
            F.cross_entropy(self.model(x), y, label_smoothing=self.smoothing).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.policy.step()


if __name__ == "__main__":
    main()
