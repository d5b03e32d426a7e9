"""What one training step costs, relative to training on all samples, in five ways.

- full: train on all N samples;
- index: cut the feature map to the S retained rows: autograd still sends zeros back for the others;
- recompute: probe, then run the shallow layers again on the S samples (`reuse="recompute"`);
- replay: probe, then replay (`reuse="replay"`);
- limit: never look at the pruned samples, train on S of them.

Three figures each. *FLOPs* are counted in a steady step. *Wall time* is measured in rounds: every round runs one step
of each way, in rotating order, and each is divided by that round's full step, so that a machine that slows down slows
down all of them. *Peak memory* is the most bytes a step had allocated beyond what there was when it began. On CUDA wall
time is the device's, and *host* is how long a step keeps the host busy, relative to the same round's full step.

The same rounds show where the time goes: the shallow forward in a full step, and the phases of a replayed one. Four
things make them slower than the prediction, which counts FLOPs: the shallow layers take a larger share of the time than
of the FLOPs; the probe takes longer than a plain forward; the selection; the cheap operations of the replay.

A step is zero_grad, blocker, forward, loss and backward. The optimizer's step is left out: it costs the same however
many samples there are.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import statistics
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ... import ForwardBlocker, ReplayError
from ...batches.batch import leaves
from ...batches.rows import take
from ...costs.cost import cost, relative_cost
from ...engine.flops import FlopCounter
from ...functional import retained_count
from ...selectors import Candidates, Density
from .measure import Clock, Step, allocated, interleaved, quartiles

WAYS = ("full", "index", "recompute", "replay", "limit")
# The phases of a step, in order. The first of a replayed step is the probe: the shallow forward on all samples.
_PHASES = {"full": ("shallow", "rest"), "replay": ("probe", "selection", "replayed", "rest")}
_WARM_UP = 2
# The selection is measured on a large batch, with the features of ResNet-50's layer2 at 96 px.
_SAMPLES, _CENTROIDS, _DIM, _FEATURES = 1024, 64, 128, (512, 12, 12)


# ------------------------------------------------------------------ one model


def compare(
    model: nn.Module,
    at: str,
    x: Tensor,
    *,
    prune_ratio: float = 0.4,
    rounds: int = 15,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    progress: str | None = None,
) -> dict[str, Any]:
    """Measure the five ways on one model.

    Args:
        model: in training mode. It is trained on (gradients, BatchNorm statistics), but no optimizer steps.
        at: the cut.
        x: (N, ...) the model's input; the loss is the mean square of whatever the model returns.
        prune_ratio: p.
        rounds: of the wall time, at least 15 to quote it.
        seed: of the choice of rows.
        autocast: blocker and model run under it, with this type; None: without.
        progress: title of a progress bar; None: no bar.

    Returns:
        plain numbers; under "ways" one entry per way: `flops`, `wall` (median, q1, q3), `host` and `peak`, all relative
        to full, with the `predicted` cost where there is a formula; or `unavailable` with the reason. "full" and
        "replay" have `phases`, too: their medians, relative to the full step. "replay" has `tape_bytes`.
    """
    if rounds < 2:
        raise ValueError(f"quartiles need at least 2 rounds, got {rounds}")
    share = cost(model, at, prune_ratio, x).shallow_share
    N, S = len(x), retained_count(len(x), prune_ratio)
    if S == N:
        raise ValueError(
            f"a prune_ratio of {prune_ratio} prunes none of {N} samples, so there is nothing to compare; take a larger "
            "ratio or a larger batch"
        )
    ratio = 1 - S / N
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(N, generator=generator)[:S].sort().values.to(x.device)
    clock = Clock(x.device)
    ways = _Ways(model, at, x, rows, prune_ratio, seed, clock, autocast)
    with contextlib.closing(ways):
        unavailable = _warm_up(ways)
        steps = {way: step for way, step in ways.steps.items() if way not in unavailable}
        flops = {way: _steady_flops(step) for way, step in steps.items()}
        peaks = {way: ways.peak(way, x.device) for way in steps}
        tape = ways.tape(x.device) if "replay" in steps else 0
        timed = interleaved(steps, rounds, clock, progress)
    seconds = {way: [step.total for step in taken] for way, taken in timed.items()}
    host = {way: [step.host for step in taken] for way, taken in timed.items()}
    predicted = {
        "full": 1.0,
        "recompute": relative_cost(share, ratio, replayed=False),
        "replay": relative_cost(share, ratio),
        "limit": 1 - ratio,
    }
    measured: dict[str, Any] = {way: {"unavailable": reason} for way, reason in unavailable.items()}
    for way in steps:
        entry: dict[str, Any] = {
            "flops": flops[way] / flops["full"],
            "wall": quartiles([t / full for t, full in zip(seconds[way], seconds["full"], strict=True)]),
            "seconds": statistics.median(seconds[way]),
            "host": statistics.median(t / full for t, full in zip(host[way], seconds["full"], strict=True)),
            "peak": peaks[way] / peaks["full"],
            "peak_bytes": peaks[way],
        }
        if way in predicted:
            entry["predicted"] = predicted[way]
            entry["flops_minus_predicted"] = entry["flops"] - predicted[way]
            entry["wall_minus_predicted"] = entry["wall"]["median"] - predicted[way]
        if way in _PHASES:
            pairs = zip(timed[way], seconds["full"], strict=True)
            relative = [[t / full for t in step.phases] for step, full in pairs]
            medians = [statistics.median(phase) for phase in zip(*relative, strict=True)]
            entry["phases"] = dict(zip(_PHASES[way], medians, strict=True))
        if way == "replay":
            entry["tape_bytes"] = tape
        measured[way] = entry
    return {
        "cut": at,
        "input": [N, *x.shape[1:]],
        "dtype": str(x.dtype).removeprefix("torch."),
        "autocast": None if autocast is None else str(autocast).removeprefix("torch."),
        "retained": S,
        "prune_ratio": prune_ratio,
        "effective_ratio": ratio,
        "shallow_share": share,
        "rounds": rounds,
        "seed": seed,
        "ways": {way: measured[way] for way in WAYS},
    }


class _Ways:
    """One training step in each way. The two with a blocker have their own copy of the model."""

    def __init__(
        self,
        model: nn.Module,
        at: str,
        x: Tensor,
        rows: Tensor,
        prune_ratio: float,
        seed: int,
        clock: Clock,
        autocast: torch.dtype | None,
    ) -> None:
        def blocking(reuse: Literal["replay", "recompute"]) -> tuple[nn.Module, ForwardBlocker]:
            own = copy.deepcopy(model)
            return own, ForwardBlocker(own, at, prune_ratio, reuse=reuse, seed=seed)

        recomputing, recompute_blocker = blocking("recompute")
        replaying, replay_blocker = blocking("replay")
        layer = model.get_submodule(at)
        step = functools.partial(train, autocast=autocast)

        def index() -> None:
            handle = layer.register_forward_hook(lambda module, args, output: take(output, rows))
            try:
                step(model, x, expected=len(rows))
            finally:
                handle.remove()

        def select(x: Tensor) -> Tensor:
            part: Tensor = replay_blocker(x)
            clock.mark()
            return part

        # Runs at the end of the shallow part: of a plain forward, a probe or a replay.
        shallow = (layer, replaying.get_submodule(at))
        self._hooks = [each.register_forward_hook(lambda *_: clock.mark()) for each in shallow]
        self._blockers = (recompute_blocker, replay_blocker)
        self._models = {"recompute": recomputing, "replay": replaying}
        self._shared = model
        self._x, self._step = x, step
        self.steps: dict[str, Step] = {
            "full": lambda: step(model, x),
            "index": index,
            "recompute": lambda: step(recomputing, x, recompute_blocker),
            "replay": lambda: step(replaying, x, select),
            # It takes its rows as a blocker does: the retained samples are in memory in both.
            "limit": lambda: step(model, take(x, rows)),
        }

    def peak(self, way: str, device: torch.device) -> int:
        """Peak memory of a step that begins without gradients."""
        self._models.get(way, self._shared).zero_grad(set_to_none=True)
        gc.collect()
        return allocated(self.steps[way], device).peak

    def tape(self, device: torch.device) -> int:
        """Bytes that a replay holds between the blocker and the model's call, beyond the retained samples."""
        held = 0

        def block(x: Tensor) -> Tensor:
            nonlocal held
            parts: list[Tensor] = []
            held = allocated(lambda: parts.append(self._blockers[1](x)), device).left - parts[0].nbytes
            return parts[0]

        self._step(self._models["replay"], self._x, block)
        return held

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for blocker in self._blockers:
            blocker.remove()


def train(
    model: nn.Module,
    x: Tensor,
    block: Callable[[Tensor], Tensor] | None = None,
    expected: int | None = None,
    autocast: torch.dtype | None = None,
) -> None:
    """One step without the optimizer's. With `expected`, every output must have that many rows."""
    model.zero_grad(set_to_none=True)
    with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        if block is not None:
            x = block(x)
        outputs = [leaf for leaf in leaves(model(x)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not outputs:
        raise ValueError(f"the {type(model).__name__} returns no tensor that needs a gradient, so there is no loss")
    if expected is not None and any(len(output) != expected for output in outputs):
        raise _NotIndexable("some outputs keep all rows")
    torch.stack([output.float().square().mean() for output in outputs]).sum().backward()


class _NotIndexable(RuntimeError):
    """Cutting the feature map does not cut the model's outputs, because a connection leads around the cut."""


def _warm_up(ways: _Ways) -> dict[str, str]:
    """Run each way a few times. Returns those that cannot be run, with the reason."""
    unavailable = {}
    for way, step in ways.steps.items():
        try:
            for _ in range(_WARM_UP):
                step()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError) as error:
            # Only these two may fail: connections around the cut (U-Net) keep all rows, and replay may refuse.
            if way != "index" and not isinstance(error, ReplayError):
                raise
            unavailable[way] = str(error).splitlines()[0]
    return unavailable


def _steady_flops(step: Step) -> float:
    """The cheaper of two steps: now and then a replayed step computes one operation again, as a check."""
    counts = []
    for _ in range(2):
        with FlopCounter() as counter:
            step()
        counts.append(counter.total)
    return min(counts)


# --------------------------------------------------------------- the selection


def selection_overhead(step_seconds_per_sample: float, rounds: int = 15) -> dict[str, Any]:
    """Seconds to pool, score, choose and learn, relative to training on as many samples.

    Args:
        step_seconds_per_sample: of full training.
        rounds: of the measurement.
    """
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(_SAMPLES, *_FEATURES, generator=generator)
    selector = Density(num_centroids=_CENTROIDS, dim=_DIM)
    count = retained_count(_SAMPLES, 0.4)

    def select() -> None:
        with torch.no_grad():
            candidates = Candidates(_SAMPLES, generator, features)
            chosen = selector.select(candidates, count)
            selector.learn(candidates, chosen.indices)

    clock = Clock(features.device)
    seconds = [clock.time(select).total for _ in range(rounds + _WARM_UP)][_WARM_UP:]
    return {
        "samples": _SAMPLES,
        "centroids": _CENTROIDS,
        "dim": _DIM,
        "features": list(_FEATURES),
        "rounds": rounds,
        "milliseconds": {k: 1000 * v for k, v in quartiles(seconds).items()},
        "full_step_seconds_per_sample": step_seconds_per_sample,
        "relative": statistics.median(seconds) / (_SAMPLES * step_seconds_per_sample),
    }
