"""What one training step costs, relative to training on all samples, in five ways.

- full: train on all N samples;
- index: cut the feature map to the S retained rows: autograd still sends zeros back for the others;
- recompute: probe, then run the shallow layers again on the S samples (`reuse="recompute"`);
- replay: probe, then replay (`reuse="replay"`);
- limit: never look at the pruned samples, train on S of them.

Three figures each. *FLOPs* are counted, in a steady step. *Wall time* is taken in rounds: every round runs one step of
each way, in an order that rotates, and each is divided by that round's full step, so that a machine that slows down
slows down all of them. *Peak memory* is the most bytes a step had allocated beyond what there was when it began.

A step is zero_grad, blocker, forward, loss and backward. The optimizer's step is left out: it costs the same however
many samples there are.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import ForwardBlocker, ReplayError, __version__
from ..batch import leaves
from ..cost import FlopCounter, columns, cost, relative_cost
from ..functional import retained_count
from ..rows import take
from ..selectors import Candidates, Density
from .models import random_input

WAYS = ("full", "index", "recompute", "replay", "limit")
_WARM_UP = 2
# The selection is measured on a large batch, with the features of ResNet-50's layer2 at 96 px.
_SAMPLES, _CENTROIDS, _DIM, _FEATURES = 1024, 64, 128, (512, 12, 12)

Step = Callable[[], None]


# ------------------------------------------------------------------ one model


def compare(
    model: nn.Module,
    at: str,
    x: Tensor,
    *,
    prune_ratio: float = 0.4,
    rounds: int = 15,
    seed: int = 0,
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
        progress: title of a progress bar; None: no bar.

    Returns:
        plain numbers; under "ways" one entry per way: `flops`, `wall` (median, q1, q3) and `peak`, all relative to
        full, with the `predicted` cost where there is a formula; or `unavailable` with the reason.
    """
    if rounds < 2:
        raise ValueError(f"quartiles need at least 2 rounds, got {rounds}")
    N, S = len(x), retained_count(len(x), prune_ratio)
    ratio = 1 - S / N
    share = cost(model, at, prune_ratio, x).shallow_share
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(N, generator=generator)[:S].sort().values.to(x.device)
    ways = _Ways(model, at, x, rows, prune_ratio, seed)
    with contextlib.closing(ways):
        unavailable = _warm_up(ways)
        steps = {way: step for way, step in ways.steps.items() if way not in unavailable}
        flops = {way: _steady_flops(step) for way, step in steps.items()}
        peaks = {way: ways.peak(way, x.device) for way in steps}
        seconds = _interleaved(steps, rounds, x.device, progress)
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
            "wall": _quartiles([t / full for t, full in zip(seconds[way], seconds["full"], strict=True)]),
            "seconds": statistics.median(seconds[way]),
            "peak": peaks[way] / peaks["full"],
            "peak_bytes": peaks[way],
        }
        if way in predicted:
            entry["predicted"] = predicted[way]
            entry["flops_minus_predicted"] = entry["flops"] - predicted[way]
            entry["wall_minus_predicted"] = entry["wall"]["median"] - predicted[way]
        measured[way] = entry
    return {
        "cut": at,
        "input": [N, *x.shape[1:]],
        "dtype": str(x.dtype).removeprefix("torch."),
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

    def __init__(self, model: nn.Module, at: str, x: Tensor, rows: Tensor, prune_ratio: float, seed: int) -> None:
        def blocking(reuse: Literal["replay", "recompute"]) -> tuple[nn.Module, ForwardBlocker]:
            own = copy.deepcopy(model)
            return own, ForwardBlocker(own, at, prune_ratio, reuse=reuse, seed=seed)

        recomputing, recompute_blocker = blocking("recompute")
        replaying, replay_blocker = blocking("replay")
        layer = model.get_submodule(at)
        part = x[rows]

        def index() -> None:
            handle = layer.register_forward_hook(lambda module, args, output: take(output, rows))
            try:
                train(model, x, expected=len(rows))
            finally:
                handle.remove()

        self._blockers = (recompute_blocker, replay_blocker)
        self._models = {"recompute": recomputing, "replay": replaying}
        self._shared = model
        self.steps: dict[str, Step] = {
            "full": lambda: train(model, x),
            "index": index,
            "recompute": lambda: train(recomputing, x, recompute_blocker),
            "replay": lambda: train(replaying, x, replay_blocker),
            "limit": lambda: train(model, part),
        }

    def peak(self, way: str, device: torch.device) -> int:
        """Peak memory of a step, which begins without gradients."""
        self._models.get(way, self._shared).zero_grad(set_to_none=True)
        gc.collect()
        return peak_bytes(self.steps[way], device)

    def close(self) -> None:
        for blocker in self._blockers:
            blocker.remove()


def train(model: nn.Module, x: Tensor, blocker: ForwardBlocker | None = None, expected: int | None = None) -> None:
    """One step without the optimizer's part. With `expected`, every output must have that many rows."""
    model.zero_grad(set_to_none=True)
    if blocker is not None:
        x = blocker(x)
    outputs = [leaf for leaf in leaves(model(x)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not outputs:
        raise ValueError(f"the {type(model).__name__} returns no tensor that needs a gradient, so there is no loss")
    if expected is not None and any(len(output) != expected for output in outputs):
        raise _NotIndexable("some outputs keep all rows")
    torch.stack([output.float().square().mean() for output in outputs]).sum().backward()


class _NotIndexable(RuntimeError):
    """Cutting the feature map does not cut the model's outputs: something leads around the cut."""


def _warm_up(ways: _Ways) -> dict[str, str]:
    """Run each way a few times. Returns those that cannot be run, with the reason."""
    unavailable = {}
    for way, step in ways.steps.items():
        try:
            for _ in range(_WARM_UP):
                step()
        except (RuntimeError, IndexError) as error:
            # Only these two may fail: connections around the cut (U-Net) keep all rows, and replay may refuse.
            if way != "index" and not isinstance(error, ReplayError):
                raise
            unavailable[way] = str(error).splitlines()[0]
    return unavailable


def _steady_flops(step: Step) -> float:
    """The lesser of two steps: once in a while a replayed step computes one operation again, to check."""
    counts = []
    for _ in range(2):
        with FlopCounter() as counter:
            step()
        counts.append(counter.total)
    return min(counts)


def _interleaved(
    steps: dict[str, Step], rounds: int, device: torch.device, progress: str | None
) -> dict[str, list[float]]:
    """Seconds of every step in every round."""
    from tqdm import tqdm

    seconds: dict[str, list[float]] = {way: [] for way in steps}
    order = list(steps)
    with tqdm(total=rounds * len(order), desc=progress, unit="step", disable=progress is None, leave=False) as bar:
        for i in range(rounds):
            for way in order[i % len(order) :] + order[: i % len(order)]:
                seconds[way].append(_timed(steps[way], device))
                bar.update()
    return seconds


def _timed(step: Step, device: torch.device) -> float:
    _synchronise(device)
    start = time.perf_counter()
    step()
    _synchronise(device)
    return time.perf_counter() - start


def _synchronise(device: torch.device) -> None:
    # Written for CUDA, never run there.
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def peak_bytes(step: Step, device: torch.device) -> int:
    """The most bytes of tensors alive at a time while `step` runs, beyond those alive when it begins."""
    if device.type == "cuda":  # never run
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # The CPU's allocator keeps no count, but tells the profiler of every allocation and release.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it complains that there is no GPU
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    results = profile.profiler.kineto_results
    events = [e for e in results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


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

    seconds = [_timed(select, features.device) for _ in range(rounds + _WARM_UP)][_WARM_UP:]
    return {
        "samples": _SAMPLES,
        "centroids": _CENTROIDS,
        "dim": _DIM,
        "features": list(_FEATURES),
        "rounds": rounds,
        "milliseconds": {k: 1000 * v for k, v in _quartiles(seconds).items()},
        "full_step_seconds_per_sample": step_seconds_per_sample,
        "relative": statistics.median(seconds) / (_SAMPLES * step_seconds_per_sample),
    }


# -------------------------------------------------------------------- results


@dataclass(frozen=True)
class Case:
    """A model of the zoo. key: its file's name. shape: of one sample."""

    key: str
    title: str
    build: Callable[[], nn.Module]
    at: str
    shape: tuple[int, ...]
    batch: int = 32


def run_cases(
    cases: Iterable[Case], folder: Path, command: str, rounds: int = 15, seed: int = 0, fresh: bool = False
) -> list[str]:
    """Measure every case that has no result in `folder` yet, and write each as it arrives.

    Returns:
        the keys of the cases that were measured.
    """
    done = []
    for case in cases:
        path = folder / f"{case.key}.json"
        if path.exists() and not fresh:
            continue
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = case.build().train()
            x = random_input((case.batch, *case.shape))
            result = compare(model, case.at, x, rounds=rounds, seed=seed, progress=case.title)
        about = {"title": case.title, "command": f"{command} --only {case.key}"}
        write_json(path, {**about, **environment(x.device), **result})
        done.append(case.key)
        del model, x
        gc.collect()
    return done


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all: whoever reads, or resumes after an interruption, never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)


def environment(device: torch.device) -> dict[str, Any]:
    """What a number must not stand without: date, versions, machine."""
    versions = {"halfway": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for library in ("torchvision", "timm", "segmentation_models_pytorch"):
        if library in sys.modules:
            versions[library] = metadata.version(library)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "device": name},
        "threads": torch.get_num_threads(),
    }


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def text_table(result: dict[str, Any]) -> str:
    """One model's result for the terminal."""
    rows, notes = [], ""
    for way, entry in result["ways"].items():
        if "unavailable" in entry:
            rows.append([way, "n/a", "", "", "", ""])
            notes += f"\n\n{way} is not possible here: {entry['unavailable']}"
            continue
        wall = entry["wall"]
        predicted = f"{entry['predicted']:.3f}" if "predicted" in entry else ""
        spread = f"{wall['q1']:.3f}-{wall['q3']:.3f}"
        rows.append([way, f"{entry['flops']:.3f}", predicted, f"{wall['median']:.3f}", spread, f"{entry['peak']:.3f}"])
    N, S = result["input"][0], result["retained"]
    return (
        f"cut at {result['cut']}, {S} of {N} samples retained, F/T = {result['shallow_share']:.3f}; a full step takes "
        f"{result['ways']['full']['seconds']:.3f} s\n"
        f"relative to full training, {result['rounds']} rounds\n\n"
        + columns(["way", "FLOPs", "predicted", "wall", "quartiles", "peak memory"], rows)
        + notes
    )


def render(folder: Path) -> str:
    """All results of a folder as a Markdown page."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path.stem != "selection"]
    results.sort(key=lambda r: r["title"])
    page = [_HEAD]
    page += ["## FLOPs", "", *_flops_table(results), ""]
    page += ["## Wall time", "", *_wall_table(results), ""]
    page += ["## Peak memory", "", *_peak_table(results), ""]
    selection = folder / "selection.json"
    if selection.exists():
        page += ["## The selection itself", "", _selection_text(json.loads(selection.read_text())), ""]
    page += ["## Where the numbers come from", "", *sorted({_provenance(r) for r in results}), ""]
    return "\n".join(page)


_HEAD = """\
# What a step costs

*Written by `benchmarks/zoo.py` from the JSON files beside it; see [the benchmark's page](../README.md) for what is
measured and how.* All figures are relative to training on all samples (1.000).
"""


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---", *("---:" for _ in header[1:])]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]


def _figure(entry: dict[str, Any], key: str) -> str:
    return "n/a" if "unavailable" in entry else f"{entry[key]:.3f}"


def _flops_table(results: list[dict[str, Any]]) -> list[str]:
    header = ["model, cut", "N x px", "S", "F/T", *WAYS[1:], "predicted", "replay - predicted"]
    rows = []
    for r in results:
        replay = r["ways"]["replay"]
        figures = [_figure(r["ways"][way], "flops") for way in WAYS[1:]]
        missed = "n/a" if "unavailable" in replay else f"{replay['flops_minus_predicted']:+.4f}"
        size = f"{r['input'][0]} x {r['input'][-1]}"
        share = f"{r['shallow_share']:.3f}"
        rows.append([_name(r), size, str(r["retained"]), share, *figures, _figure(replay, "predicted"), missed])
    return _markdown(header, rows)


def _wall_table(results: list[dict[str, Any]]) -> list[str]:
    header = ["model, cut", "full step", *WAYS[1:], "replay - predicted", "rounds"]
    rows = []
    for r in results:
        replay = r["ways"]["replay"]
        figures = []
        for way in WAYS[1:]:
            wall = r["ways"][way].get("wall")
            figures.append(f"{wall['median']:.3f} ({wall['q1']:.3f}-{wall['q3']:.3f})" if wall else "n/a")
        missed = "n/a" if "unavailable" in replay else f"{replay['wall_minus_predicted']:+.3f}"
        rows.append([_name(r), f"{r['ways']['full']['seconds']:.2f} s", *figures, missed, str(r["rounds"])])
    return _markdown(header, rows)


def _peak_table(results: list[dict[str, Any]]) -> list[str]:
    rows = [
        [
            _name(r),
            f"{r['ways']['full']['peak_bytes'] / 2**20:.0f} MiB",
            *(_figure(r["ways"][way], "peak") for way in WAYS[1:]),
        ]
        for r in results
    ]
    return _markdown(["model, cut", "full", *WAYS[1:]], rows)


def _name(result: dict[str, Any]) -> str:
    return f"{result['title']}, `{result['cut']}`"


def _selection_text(s: dict[str, Any]) -> str:
    took = s["milliseconds"]
    features = " x ".join(map(str, s["features"]))
    return (
        f"Pool, score, choose and learn for {s['samples']} samples ({features} features, {s['centroids']} centroids of "
        f"{s['dim']} dimensions): {took['median']:.1f} ms (quartiles {took['q1']:.1f}-{took['q3']:.1f}, {s['rounds']} "
        f"rounds), {s['relative']:.2%} of training on as many samples with ResNet-50 "
        f"({1000 * s['full_step_seconds_per_sample']:.1f} ms each)."
    )


def _provenance(result: dict[str, Any]) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"- {result['title']}: {result['date']}, {machine['cpu']}, {machine['cores']} cores, "
        f"{result['threads']} threads, device {machine['device']}; {versions}; seed {result['seed']}; "
        f"`{result['command']}`"
    )
