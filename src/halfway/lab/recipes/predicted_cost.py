"""What a method costs, before anything is trained: the FLOPs of one forward pass, counted on the meta device.

A pruned sample pays for what its method must see of it: nothing, the layers up to the cut, or the whole forward pass.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from ...costs.cost import Cost, cost_of, relative_cost, share_of_run
from .methods import METHODS, settings_of
from .schema import Recipe

if TYPE_CHECKING:
    from torch import Tensor, nn

Equal = Literal["ratio", "flops"]
_EXAMPLES = 2  # BatchNorm in training mode needs more than one


def predicted_cost(recipe: Recipe) -> Cost:
    """The cost of a pruned step and of the run, relative to full data, counted on the meta device."""
    ratio = recipe.mean_ratio if recipe.prunes and not recipe.repeats else 0.0
    pruned_share = share_of_run(recipe.schedule, recipe.length)
    cost = cost_of(probe_share(recipe), ratio, pruned_share)
    if recipe.pruning is not None and recipe.pruning.needs == "inputs":
        # Its small model also learns where nothing is pruned.
        return dataclasses.replace(cost, run=cost.run + (1 - pruned_share) * _small(recipe)[1])
    return cost


def probe_share(recipe: Recipe) -> float:
    """The cost of what the method runs on a pruned sample, relative to a whole training step of one sample."""
    method = recipe.pruning
    if method is None or method.needs == "nothing":
        return 0.0
    model, data = recipe.model, recipe.data
    if method.needs == "inputs":
        # Its small model runs on all samples, and is trained on the retained ones.
        forward, training = _small(recipe)
        return (forward + (1 - recipe.mean_ratio) * training) / recipe.mean_ratio
    cut = recipe.cut if method.needs == "features" else None
    return _forward_share(model.name, json.dumps(model.options), data.classes, data.size, cut)


def fitted(recipe: Recipe, equal: Equal | None) -> dict[str, Any]:
    """The settings with which the recipe's method really prunes `prune_ratio`, or costs what PFB costs at that ratio.

    InfoBatch prunes only a share of its candidates, so its threshold is matched to the ratio; if the variant fixes the
    threshold, the ratio is raised.
    """
    if equal is None or recipe.pruning is None:
        return {}
    ratio = recipe.mean_ratio
    if equal == "flops":
        budget = relative_cost(probe_share(recipe.with_settings({"method": "pfb"})), ratio)
        ratio = round((1 - budget) / (1 - probe_share(recipe)), 3)
    method = METHODS[recipe.method]
    if method.implementation != "infobatch":
        return {"prune_ratio": ratio}
    if "threshold" not in method.preset:
        return {"prune_ratio": ratio, "infobatch.threshold": "match"}
    ratio = round(ratio / method.preset["threshold"], 3)
    if ratio >= 1:
        raise ValueError(f"{recipe.method} cannot prune so much: only {method.preset['threshold']:.0%} are candidates")
    return {"prune_ratio": ratio}


def control_ratio(recipe: Recipe) -> float:
    """The ratio at which a control, which knows no window, costs what the recipe's run does."""
    return round(1 - predicted_cost(recipe).run, 4)


def random_ratio(recipe: Recipe) -> float:
    """The ratio at which random pruning costs what the recipe's method does."""
    return round(1 - relative_cost(probe_share(recipe), recipe.mean_ratio), 3)


@dataclass(frozen=True)
class SampleFlops:
    """FLOPs of one sample: of the forward pass, and of a training step."""

    forward: float
    step: float


def sample_flops(recipe: Recipe) -> SampleFlops:
    """What a sample costs in the recipe's network, if it is not pruned."""
    model = recipe.model
    return _sample_flops(model.name, json.dumps(model.options), recipe.data.classes, recipe.data.size)


@lru_cache
def _forward_share(name: str, options: str, classes: int, size: tuple[int, int], cut: str | None) -> float:
    """The share of the forward pass up to the cut (None: of all of it) in a training step. `options`: of the network,
    as JSON."""
    from ...costs.cost import cost

    if cut is not None:
        model, example = _network(name, options, classes, size, "meta")
        return cost(model, cut, 0.0, example).shallow_share
    flops = _sample_flops(name, options, classes, size)
    return flops.forward / flops.step if flops.step else 0.0


def _small(recipe: Recipe) -> tuple[float, float]:
    """What `proxy` costs per sample, relative to a training step of the model: its forward pass, and its training,
    which happens on every n-th batch."""
    every = recipe.method_settings.get("every", settings_of("proxy")["every"])
    options = json.dumps(recipe.proxy_options)
    small = _sample_flops(recipe.model.name, options, recipe.data.classes, recipe.data.size)
    whole = sample_flops(recipe).step
    return small.forward / whole, small.step / whole / every


@lru_cache
def _sample_flops(name: str, options: str, classes: int, size: tuple[int, int]) -> SampleFlops:
    from ...costs.cost import run_metered
    from ...engine.flops import Meter

    def metered(device: str) -> Meter:
        model, example = _network(name, options, classes, size, device)
        run_metered(model, (example,), meter := Meter())
        return meter

    try:
        meter = metered("meta")
    except (NotImplementedError, RuntimeError):  # a network that needs real values
        meter = metered("cpu")
    return SampleFlops(meter.forward / _EXAMPLES, (meter.forward + meter.backward) / _EXAMPLES)


def _network(name: str, options: str, classes: int, size: tuple[int, int], device: str) -> tuple[nn.Module, Tensor]:
    """The network, and an example for it."""
    import torch

    from ..models import small as nets

    with torch.device(device):
        model = nets.build(name, classes, json.loads(options), None, 0, size[0]).train()
    return model, torch.zeros(_EXAMPLES, 3, *size, device=device)
