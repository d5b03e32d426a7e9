"""The benchmark's results: measured model by model, kept as JSON, shown as tables."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...tables import columns
from ..environment import environment
from ..files import write_json
from ..models.by_name import random_input
from .steps import WAYS, compare


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
        about = {"title": case.title, "command": f"{command} --only {case.key} --rounds {rounds}"}
        write_json(path, {**about, **environment(x.device), **result})
        done.append(case.key)
        del model, x
        gc.collect()
    return done


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
        + _phases_line(result)
        + notes
    )


def _phases_line(result: dict[str, Any]) -> str:
    phases = result["ways"]["replay"].get("phases")
    if phases is None:
        return ""
    shallow = result["ways"]["full"]["phases"]["shallow"]
    return (
        f"\n\nin a replayed step: probe {phases['probe']:.3f}, selection {phases['selection']:.3f}, replayed shallow "
        f"forward {phases['replayed']:.3f}, rest {phases['rest']:.3f}; in a full step: shallow forward {shallow:.3f}"
    )


def render(folder: Path) -> str:
    """All results of a folder as a Markdown page."""
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    results = [result for name, result in found.items() if name not in ("selection", "ranks", "loop")]
    results.sort(key=lambda r: r["title"])
    page = [_HEAD]
    page += ["## FLOPs", "", *_flops_table(results), ""]
    page += ["## Wall time", "", *_wall_table(results), ""]
    page += ["## Where replay's time goes", "", _PHASES_TEXT, "", *_phases_table(results), ""]
    page += ["## Peak memory", "", *_peak_table(results), ""]
    if "selection" in found:
        page += ["## The selection itself", "", _selection_text(found["selection"]), ""]
    if "ranks" in found:
        page += ["## The sum over ranks", "", _ranks_text(found["ranks"]), ""]
    if "loop" in found:
        page += ["## The loop of `halfway train`", "", _loop_text(found["loop"]), ""]
    page += ["## Where the numbers come from", "", *sorted({_provenance(r) for r in results}), ""]
    return "\n".join(page)


_HEAD = """\
# What a step costs

*Written by `benchmarks/zoo.py` from the JSON files beside it; see [the benchmark's page](../README.md) for what is
measured and how.* All figures are relative to training on all samples (1.000).
"""


_PHASES_TEXT = """\
Medians of the same rounds, relative to the full step. The prediction counts FLOPs, the clock does not: the last column
is what the phases add up to, beyond the prediction,
p (shallow, time - shallow, FLOPs) + (probe - shallow, time) + selection + replayed.
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


def _phases_table(results: list[dict[str, Any]]) -> list[str]:
    header = ["model, cut", "shallow, FLOPs", "shallow, time", "probe", "selection", "replayed", "beyond prediction"]
    rows = []
    for r in results:
        phases = r["ways"]["replay"].get("phases")
        if phases is None:
            continue
        counted, timed = r["shallow_share"], r["ways"]["full"]["phases"]["shallow"]
        figures = [counted, timed, *(phases[name] for name in ("probe", "selection", "replayed"))]
        beyond = r["effective_ratio"] * (timed - counted) + sum(figures[2:]) - timed
        rows.append([_name(r), *(f"{figure:.3f}" for figure in figures), f"{beyond:+.3f}"])
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


def _ranks_text(r: dict[str, Any]) -> str:
    took = r["milliseconds"]
    return (
        f"The one all-reduce per step ({r['bytes'] / 1024:.0f} KiB) over {r['ranks']} processes (gloo, one machine): "
        f"{took['median']:.2f} ms (quartiles {took['q1']:.2f}-{took['q3']:.2f}, {r['rounds']} rounds), "
        f"{r['relative']:.2%} of a DDP step of ResNet-50 with halfway ({r['step_seconds']:.2f} s, 32 samples of 96 px "
        f"each). {r['date']}, torch {r['versions']['torch']}; `{r['command']}`"
    )


def _loop_text(r: dict[str, Any]) -> str:
    ours, waited = r["ours_over_hand"], r["waiting_for_data"]
    return (
        f"An epoch of `halfway train {r['recipe']}` at ratio 0 takes {ours['median']:.3f} of the time of the same loop "
        f"written by hand (quartiles {ours['q1']:.3f}-{ours['q3']:.3f}, {r['rounds']} epochs of each in turn), with "
        f"progress bar, metrics, TensorBoard and checkpoint, without evaluation; {waited['median']:.1%} of it is "
        f"waiting for data, augmentation included (quartiles {waited['q1']:.1%}-{waited['q3']:.1%}). {r['date']}, "
        f"torch {r['versions']['torch']}, {r['threads']} threads; `{r['command']}`"
    )


def _provenance(result: dict[str, Any]) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"- {result['title']}: {result['date']}, {machine['cpu']}, {machine['cores']} cores, "
        f"{result['threads']} threads, device {machine['device']}; {versions}; seed {result['seed']}; "
        f"`{result['command']}`"
    )
