"""The page of the results folder: `python benchmarks/page.py` writes benchmarks/results/README.md from the JSON files.

`results/models/` holds one file per model of the zoo. Every other measurement has a file of its own in `results/`, and
a section here if it has one; files that this page does not know are left alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from halfway.lab.bench.steps import WAYS
from halfway.lab.files import write_whole
from halfway.tables import markdown

RESULTS = Path(__file__).parent / "results"


def write(folder: Path = RESULTS) -> None:
    """Write the folder's README.md anew."""
    write_whole(folder / "README.md", render(folder))


def render(folder: Path) -> str:
    """All results of a folder as a Markdown page."""
    results = [json.loads(path.read_text()) for path in (folder / "models").glob("*.json")]
    results.sort(key=lambda r: r["title"])
    page = [_HEAD]
    page += ["## FLOPs", "", _flops_table(results), ""]
    page += ["## Wall time", "", _wall_table(results), ""]
    page += ["## Where replay's time goes", "", _PHASES_TEXT, "", _phases_table(results), ""]
    page += ["## Peak memory", "", _peak_table(results), ""]
    for name, (title, text) in _SECTIONS.items():
        path = folder / f"{name}.json"
        if path.exists():
            page += [f"## {title}", "", text(json.loads(path.read_text())), ""]
    page += ["## Where the numbers come from", "", *sorted({_provenance(r) for r in results}), ""]
    return "\n".join(page)


_HEAD = """\
# What a step costs

*Written by `benchmarks/page.py` from the JSON files in this folder; see [the benchmark's page](../README.md) for what
is measured and how.* All figures are relative to training on all samples (1.000).
"""


_PHASES_TEXT = """\
Medians of the same rounds, relative to the full step. The prediction counts FLOPs, the clock does not. *Slower limit*:
how far the limit is above 1 - p, since fewer samples take more time each. *Explained*: that and the phases,
p (shallow, time - shallow, FLOPs) + (probe - shallow, time) + selection + replayed, to be compared with what was
*measured*, replay - predicted.
"""


def _figure(entry: dict[str, Any], key: str) -> str:
    return "n/a" if "unavailable" in entry else f"{entry[key]:.3f}"


def _flops_table(results: list[dict[str, Any]]) -> str:
    header = ["model, cut", "N x px", "S", "F/T", *WAYS[1:], "predicted", "replay - predicted"]
    rows = []
    for r in results:
        replay = r["ways"]["replay"]
        figures = [_figure(r["ways"][way], "flops") for way in WAYS[1:]]
        missed = "n/a" if "unavailable" in replay else f"{replay['flops_minus_predicted']:+.4f}"
        size = f"{r['input'][0]} x {r['input'][-1]}"
        share = f"{r['shallow_share']:.3f}"
        rows.append([_name(r), size, str(r["retained"]), share, *figures, _figure(replay, "predicted"), missed])
    return markdown(header, rows)


def _wall_table(results: list[dict[str, Any]]) -> str:
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
    return markdown(header, rows)


def _phases_table(results: list[dict[str, Any]]) -> str:
    header = ["model, cut", "shallow, FLOPs", "shallow, time", "probe", "selection", "replayed"]
    header += ["slower limit", "explained", "measured"]
    rows = []
    for r in results:
        phases = r["ways"]["replay"].get("phases")
        if phases is None:
            continue
        counted, timed = r["shallow_share"], r["ways"]["full"]["phases"]["shallow"]
        figures = [counted, timed, *(phases[name] for name in ("probe", "selection", "replayed"))]
        beyond = r["effective_ratio"] * (timed - counted) + sum(figures[2:]) - timed
        slower = r["ways"]["limit"]["wall_minus_predicted"]
        sums = [slower, slower + beyond, r["ways"]["replay"]["wall_minus_predicted"]]
        rows.append([_name(r), *(f"{figure:.3f}" for figure in figures), *(f"{figure:+.3f}" for figure in sums)])
    return markdown(header, rows)


def _peak_table(results: list[dict[str, Any]]) -> str:
    rows = []
    for r in results:
        ways = r["ways"]
        replay = ways["replay"]
        to_limit = "n/a" if "unavailable" in replay else f"{replay['peak_bytes'] / ways['limit']['peak_bytes']:.3f}"
        tape = f"{replay['tape_bytes'] / 2**20:.0f} MiB" if "tape_bytes" in replay else ""
        full = f"{ways['full']['peak_bytes'] / 2**20:.0f} MiB"
        rows.append([_name(r), full, *(_figure(ways[way], "peak") for way in WAYS[1:]), to_limit, tape])
    return markdown(["model, cut", "full", *WAYS[1:], "replay / limit", "tape"], rows)


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


def _quartiles(q: dict[str, float]) -> str:
    return f"{q['median']:.2f} ({q['q1']:.2f}-{q['q3']:.2f})"


def _host_text(found: dict[str, Any]) -> str:
    rows = [
        [
            r["model"],
            f"`{r['at']}`",
            str(r["operations"]),
            *(f"{r[k]:,}" for k in ("plain", "floor", "replayed")),
            f"{r['replayed'] / r['plain']:.1f}",
            f"{(r['replayed'] - r['floor'] - 700) / (2 * r['operations']):.0f}",
        ]
        for r in found["calls"]
    ]
    header = ["model", "cut", "operations before it", "plain", "floor", "replayed", "replayed / plain", "per operation"]
    times = [
        [name, *(f"{q['median']:.0f} ({q['q1']:.0f}-{q['q3']:.0f})" for q in (took["blocker"], took["replay"]))]
        for name, took in found["microseconds"].items()
    ]
    share = found["bookkeeping"]
    probe, selection, replay = share["parts"]
    return f"""\
Calls of Python functions in a steady step (batch of 8, SGD, `density`, p = 0.5), counted by cProfile: training on the
retained samples alone; the *floor*, which runs the shallow forward once more and has both under a dispatch mode that
does nothing; a replayed step. The last column is what a replayed step calls beyond the floor and 700 per step, for each
operation before the cut and each of its two passes.

{markdown(header, rows)}

Microseconds that a layer of a chain of {found["layers"]} tiny ones takes longer, median and quartiles of
{found["rounds"]} rounds:

{markdown(["layers", "blocker's call", "replayed call"], times)}

Choosing and bookkeeping in a step of {share["model"]}, cut at `{share["at"]}`: {_quartiles(share["milliseconds"])} ms,
{_quartiles({k: 100 * v for k, v in share["relative"].items()})} % of a full step on 32 samples of 96 px
({share["full_milliseconds"]["median"] / 1e3:.2f} s). Median and quartiles of {share["rounds"]} rounds,
{share["threads"]} threads. It is what a step on 4 samples of 32 px, which compute next to nothing, takes longer in the
probe than in a plain shallow forward ({probe:.1f} ms), for the selection ({selection:.1f} ms), and in the replay than
in that of a twin without halfway, whose convolutions give back stored outputs ({replay:.1f} ms).

{_provenance(found)}"""


def _launches_text(found: dict[str, Any]) -> str:
    rows = []
    for r in found["models"]:
        recording, gathers = r["probe"] - r["shallow"], r["gathers"] - r["answered"]
        figures = [r["plain"], r["shallow"], r["selection"], recording, r["batch"], gathers, r["replay"], r["added"]]
        cost = f"{r['added'] / r['plain']:.2f}"
        rows.append([f"{r['model']}, `{r['at']}`", *map(str, figures), cost, str(r["checked"])])
    header = ["model, cut", "plain", "shallow forward", "selection", "recording", "batch", "gathers", "replay"]
    header += ["added", "added / plain", "every 16th step"]
    return f"""\
Operations that compute or copy, each of which is at least one launch on a GPU: those of a step of training on the
retained samples alone (*plain*: forward pass, loss, backward pass), and what a replayed step adds to it. That is the
shallow forward of all samples, which no method that looks at features can do without; choosing and learning
(`density`, nearly the same for every model); copies that the recording makes of what would be overwritten or moved;
cutting the batch; gathers from the tape, beyond the operations that they stand in for; what else the replay does. Every
16th step is checked, and adds the last column. The numbers depend neither on the number of samples nor on the machine.

{markdown(header, rows)}

{_provenance(found)}"""


def _loading_text(found: dict[str, Any]) -> str:
    rows = []
    for way, each in found["ways"].items():
        q = each["relative"]
        rows.append([way, str(each["decoded"]), f"{q['median']:.3f} ({q['q1']:.3f}-{q['q3']:.3f})"])
    full = found["full_epoch_seconds"]["median"]
    return f"""\
An epoch of ResNet-18 on {found["images"]} JPEG files of 224 px. {found["workers"]} workers decode and augment them;
training is at 32 px, so that loading is the bottleneck. Random pruning, p = {found["prune_ratio"]:g}. Median and
quartiles of {found["rounds"]} epochs of each way in turn, relative to the round's full epoch ({full:.1f} s).

{markdown(["way", "decoded", "time of an epoch"], rows)}

{_provenance(found)}"""


def _compiled_text(found: dict[str, Any]) -> str:
    rows = []
    for r in found["models"]:
        for way, each in r["ways"].items():
            walls = (each["wall"], each["wall_to_compiled"])
            figures = [f"{q['median']:.3f} ({q['q1']:.3f}-{q['q3']:.3f})" for q in walls]
            rows.append([_name(r), way, f"{each['flops']:.3f}", *figures, f"{each['warm_up_seconds']:.0f} s"])
    first = found["models"][0]
    header = ["model, cut", "way", "FLOPs", "time, to eager full", "time, to compiled full", "first 5 steps"]
    return f"""\
Steps on {first["input"][0]} samples of {first["input"][-1]} px, of which {first["retained"]} are retained. *Full*
trains on all of them. *Compiled, recompute* is `torch.compile(model)` with a blocker: its shallow layers run eagerly on
all samples and then again, compiled, on the retained ones. *Compiled, replay* is `halfway.compile(model, at=...)`: only
what comes after the cut is compiled. Median and quartiles of {first["rounds"]} rounds, backend {first["backend"]}.

{markdown(header, rows)}

{_provenance(found)}"""


def _coresets_text(found: dict[str, Any]) -> str:
    sizes = list(next(iter(found["methods"].values()))["sizes"])
    rows = []
    for name, each in found["methods"].items():
        seconds = [f"{each['sizes'][n]['seconds']:.2f}" for n in sizes]
        peak = f"{each['sizes'][sizes[-1]]['mebibytes'] / 1024:.1f} GiB"
        rows.append([f"`{name}`", *seconds, peak, f"{each['power']:.2f}", f"{each['imagenet_seconds'] / 60:.1f} min"])
    header = ["method", *(f"{int(n):,}, s" for n in sizes), "peak memory", "power of N", "ImageNet"]
    return f"""\
Seconds to choose {found["keep"]:.0%} of so many made-up samples ({found["classes"]} classes, {found["features"]}
features), without the trainings that the choice goes by; the peak memory of the whole process at the largest size;
which power of N the last two sizes give. Greedy methods choose within each class, and their time grows with the size of
the classes: *ImageNet* is what a thousand classes of 1,281 samples would take by the first two sizes, extrapolated and
not measured. It is extrapolated with the logits of ten classes. `glister`, `craig`, `influence` and `dataset_pruning`
work on one error per class and take longer with a thousand than it says, `glister` in each of its hundred rounds. What
takes a fraction of a second has no meaningful power.

{markdown(header, rows)}

{_provenance(found)}"""


_SECTIONS = {
    "host": ("Host time", _host_text),
    "launches": ("Launches", _launches_text),
    "compiled": ("Compiled models", _compiled_text),
    "selection": ("The selection itself", _selection_text),
    "ranks": ("The sum over ranks", _ranks_text),
    "loop": ("The loop of `halfway train`", _loop_text),
    "loading": ("Pruning before loading", _loading_text),
    "coresets": ("Choosing a coreset", _coresets_text),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    write(parser.parse_args().out)
