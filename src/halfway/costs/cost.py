"""What a cut saves, before any training: FLOPs counted on one forward pass.

Let T be the FLOPs of a training step per sample (forward and backward) and F those of the shallow forward. With
probe and replay a pruned sample pays F, a retained one T: a step costs (1 - p) + p F/T of full training. A run saves
less than a step, since the first and last epochs prune nothing: every table has both columns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..batches import batch
from ..engine.flops import Meter
from ..engine.footprint import Footprint
from ..engine.sandbox import Guard, NoGraph, sandbox
from ..modules import find_layer, unwrap
from ..ratios import PruneRatio, Ratios
from ..schedule import Schedule


@dataclass(frozen=True)
class Cost:
    """Cost relative to full training (1.0 is training on all samples).

    shallow_share: F/T, the shallow forward relative to a whole training step of one sample.
    step: one step in which samples are pruned.
    run: a whole run, including the epochs in which none are.
    """

    shallow_share: float
    step: float
    run: float


def relative_cost(shallow_share: float, ratio: float, *, replayed: bool = True) -> float:
    """Cost of a step that prunes `ratio` of its samples: (1 - p) + p F/T replayed, (1 - p) + F/T recomputed."""
    return 1 - ratio + shallow_share * (ratio if replayed else 1.0)


def cost(
    model: nn.Module,
    at: str | nn.Module,
    prune_ratio: PruneRatio,
    *example: Any,
    schedule: Schedule | None = None,
    length: int | None = None,
) -> Cost:
    """What blocking at a layer will cost, relative to training on all samples. Nothing is trained.

    One forward pass is counted, in the mode (train or eval) the model is in, and leaves no trace.

    Args:
        model: any module; wrappers (DDP, torch.compile) are looked through.
        at: the cut, a submodule or its name.
        prune_ratio: p, in [0, 1), used as it is. (A batch prunes a whole number of samples; `stats` has the effective
            ratio of a training.) One that changes in the course of the run (`halfway.ramp`) counts with its mean.
        *example: the model's positional inputs, batch first; or one dict, its keyword inputs. One or two samples do.
        schedule: when samples are pruned; None: always.
        length: of the run, in the schedule's unit.
    """
    ratio = mean_ratio(prune_ratio, schedule, length)
    pruned_share = share_of_run(schedule, length)
    name, layer = find_layer(unwrap(model)[0], at)
    meter, visits = Meter(), []

    def at_cut(module: nn.Module, args: Any, output: Any) -> None:
        visits.append(name)
        meter.reached_cut()

    handle = layer.register_forward_hook(at_cut)
    try:
        run_metered(model, example, meter)
    finally:
        handle.remove()
    if len(visits) != 1:
        how = f"runs {len(visits)} times" if visits else "never runs"
        raise ValueError(
            f"layer {name!r} {how} in the model's forward pass, so it is no place to cut; choose one that runs once "
            "(`halfway layers` lists them)"
        )
    return cost_of(meter.shallow_share, ratio, pruned_share)


def cost_of(shallow_share: float, prune_ratio: float, pruned_share: float) -> Cost:
    step = relative_cost(shallow_share, prune_ratio)
    return Cost(shallow_share, step, pruned_share * step + (1 - pruned_share))


def mean_ratio(prune_ratio: PruneRatio, schedule: Schedule | None, length: int | None) -> float:
    """Of the steps in which samples are pruned: what they cost is linear in the ratio."""
    ratios = Ratios(prune_ratio, schedule or Schedule())
    if not ratios.change:
        return ratios.at(0)
    if length is None:
        raise ValueError("the cost of a run whose prune_ratio changes depends on its length: pass length=")
    return ratios.mean(schedule or Schedule(), length)


def share_of_run(schedule: Schedule | None, length: int | None) -> float:
    if schedule is None:
        return 1.0
    if length is None:
        raise ValueError(f"the cost of a run with {schedule} depends on its length: pass length=, in {schedule.unit}s")
    return schedule.share(length)


def run_metered(model: nn.Module, example: tuple[Any, ...], mode: TorchDispatchMode) -> None:
    """One forward pass under `mode` that leaves no trace: weights, buffers, inputs, attributes, random generators."""
    root, compiled = unwrap(model)
    args, kwargs = arguments(example)
    batch.length((args, kwargs))  # complains if there is no tensor
    tensors = [leaf for leaf in batch.leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    guard, graph = Guard(tensors), NoGraph()
    with sandbox(Footprint(root), guard, tensors[0].device, audited=True), contextlib.ExitStack() as stack:
        if compiled:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        # With grad enabled, so that it shows which tensors need a gradient.
        stack.enter_context(torch.enable_grad())
        stack.enter_context(graph)
        stack.enter_context(guard)  # below `mode`, which then does not see the guard's own copying
        stack.enter_context(mode)
        root(*args, **kwargs)


def arguments(example: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(example) == 1 and isinstance(example[0], Mapping):
        return (), dict(example[0])
    return example, {}
