"""What a method costs, before anything is trained: the FLOPs of one forward pass, counted on the meta device.

A pruned sample pays for what its method must see of it: nothing, the layers up to the cut, or the whole forward pass.
"""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from typing import Any, Literal

from ...costs.cost import Cost, cost_of, relative_cost, share_of_run
from .methods import METHODS, settings_of
from .schema import Recipe

Equal = Literal["ratio", "flops"]


def predicted_cost(recipe: Recipe) -> Cost:
    """The cost of a pruned step and of the run, relative to full data, counted on the meta device."""
    ratio = recipe.prune_ratio if recipe.prunes else 0.0
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
        return (forward + (1 - recipe.prune_ratio) * training) / recipe.prune_ratio
    cut = recipe.cut if method.needs == "features" else None
    return _forward_share(model.name, json.dumps(model.options), data.classes, data.size, cut)


def fitted(recipe: Recipe, equal: Equal | None) -> dict[str, Any]:
    """The settings with which the recipe's method really prunes `prune_ratio`, or costs what PFB costs at that ratio.

    InfoBatch prunes only a share of its candidates, so its threshold is matched to the ratio; if the variant fixes the
    threshold, the ratio is raised.
    """
    if equal is None or recipe.pruning is None:
        return {}
    ratio = recipe.prune_ratio
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
    return round(1 - relative_cost(probe_share(recipe), recipe.prune_ratio), 3)


@lru_cache
def _forward_share(name: str, options: str, classes: int, size: tuple[int, int], cut: str | None) -> float:
    """The share of the forward pass up to the cut (None: of all of it) in a training step. `options`: of the network,
    as JSON."""
    if cut is None:
        forward, step = _flops(name, options, classes, size)
        return forward / step if step else 0.0
    from ...costs.cost import cost

    model, example = _on_meta(name, options, classes, size)
    return cost(model, cut, 0.0, example).shallow_share


def _small(recipe: Recipe) -> tuple[float, float]:
    """What `proxy` costs per sample, relative to a training step of the model: its forward pass, and its training,
    which happens on every n-th batch."""
    name, data = recipe.model.name, recipe.data
    every = recipe.method_settings.get("every", settings_of("proxy")["every"])
    forward, step = _flops(name, json.dumps(recipe.proxy_options), data.classes, data.size)
    whole = _flops(name, json.dumps(recipe.model.options), data.classes, data.size)[1]
    return forward / whole, step / whole / every


@lru_cache
def _flops(name: str, options: str, classes: int, size: tuple[int, int]) -> tuple[float, float]:
    """Of the forward pass and of a training step of two samples."""
    from ...costs.cost import run_metered
    from ...engine.flops import Meter

    model, example = _on_meta(name, options, classes, size)
    meter = Meter()
    run_metered(model, (example,), meter)
    return meter.forward, meter.forward + meter.backward


def _on_meta(name: str, options: str, classes: int, size: tuple[int, int]) -> tuple[Any, Any]:
    """The network and two samples, without memory."""
    import torch

    from ..models import small as nets

    with torch.device("meta"):
        model = nets.build(name, classes, json.loads(options), None, 0, size[0]).train()
    return model, torch.empty(2, 3, *size, device="meta")
