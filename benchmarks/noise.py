"""How much of PFB's choice the density makes, and how much the noise: an untrained ResNet-18 on CIFAR-10, p = 0.5.

python benchmarks/noise.py --data data

The first two batches of 128 fill the estimator, the next ten are chosen from; nothing is trained. 1: the choice is the
one without noise, 0: no more of it than by chance. Half a minute on one core; prints a Markdown table.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

from halfway import Density
from halfway.lab import data
from halfway.lab.recipes import reading
from halfway.selectors import Candidates
from halfway.tables import markdown

BATCH, FILLING, STEPS = 128, 2, 10
CUTS = ("layer1", "layer2")
NOISE: dict[str, dict[str, Any]] = {
    "b = 0.01": {"noise": 0.01},
    "b = 0.001": {"noise": 0.001},
    'b = 1, `noise_scale="spread"`': {"noise": 1.0, "noise_scale": "spread"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data", metavar="DIR", help="where CIFAR-10 lies")
    model, batches = features(parser.parse_args().data)
    rows = []
    for cut in CUTS:
        found = [share(getattr(model, cut), cut, batches, settings) for settings in NOISE.values()]
        rows.append([f"`{cut}`", str(batches[0][cut].shape[1]), *(f"{value:.2f}" for value in found)])
    print(markdown(["cut", "D", *NOISE], rows))


def features(root: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """The network, and what leaves its cuts in each batch."""
    samples = BATCH * (FILLING + STEPS)
    recipe = reading.load("cifar10-resnet18").with_settings({"root": root, "data.train_samples": samples})
    images = data.load(recipe.data, recipe.root).train
    model = recipe.network()
    seen: dict[str, Tensor] = {}
    for cut in CUTS:
        getattr(model, cut).register_forward_hook(lambda _, __, out, cut=cut: seen.update({cut: out}))
    batches = []
    with torch.no_grad():
        order = torch.arange(samples).split(BATCH)
        for x, _, _ in images.batches([(ids, seed) for seed, ids in enumerate(order)]):
            model(x)
            batches.append(dict(seen))
    return model, batches


@torch.no_grad()
def share(layer: nn.Module, name: str, batches: list[dict[str, Tensor]], settings: dict[str, Any]) -> float:
    """The share of the choice that is the density's, over the last steps."""
    selector = Density(**settings)
    selector.bind(name, layer)
    for step, batch in enumerate(batches):
        candidates = Candidates(BATCH, torch.Generator().manual_seed(step), batch[name])
        retained = None if step < FILLING else selector.select(candidates, BATCH // 2).indices
        selector.learn(candidates, retained)
    return selector.diagnostics()["chosen_by_density"]


if __name__ == "__main__":
    main()
