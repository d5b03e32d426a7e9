"""From the demo's records to its numbers, its table and its sentences. No claim is made that the numbers do not carry.

A difference between two methods is paired: seed by seed, same weights and batches, then averaged. It counts as more
than noise only outside the 95 % t interval over seeds, and if it is larger than one test image.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..comparison.paired import standard_error
from .demo import METHODS, Digits, Record, Settings

NAMES = {"full": "full data", "random": "random", "pfb": "PFB"}
COLUMNS = (
    "method",
    "accuracy, %",
    "vs random, points",
    "effective ratio, step / run",
    "FLOPs, step / run",
    "wall time, pruned epochs",
)
Verdict = Literal["higher", "lower", "noise", "one seed"]


@dataclass(frozen=True)
class Difference:
    """A paired difference of two methods' accuracies: mean and standard error over seeds (None for one seed)."""

    mean: float
    error: float | None
    verdict: Verdict


@dataclass(frozen=True)
class MethodSummary:
    """One row of the table; costs are relative to full, and pairs are (pruned epochs, whole run)."""

    accuracies: list[float]
    mean: float
    error: float | None
    versus: dict[str, Difference]
    effective_ratio: tuple[float, float]
    flops: tuple[float, float]
    seconds_ratio: tuple[float, float, float]


@dataclass(frozen=True)
class Summary:
    """Everything the table, the sentences and the page say. `retention` holds a rate (N,) per training image."""

    settings: Settings
    train_images: int
    test_images: int
    methods: dict[str, MethodSummary]
    retention: dict[str, Tensor]


def summarise(records: Sequence[Record], settings: Settings, digits: Digits) -> Summary:
    """The numbers of all runs."""
    by_method = {m: [r for r in records if r.method == m] for m in METHODS}
    finals = {m: [r.accuracy[-1] for r in runs] for m, runs in by_method.items()}
    test_images = len(digits.test_labels)
    pruned = slice(settings.schedule.start, settings.schedule.stop)
    methods = {}
    for method, runs in by_method.items():
        methods[method] = MethodSummary(
            accuracies=finals[method],
            mean=statistics.fmean(finals[method]),
            error=standard_error(finals[method]),
            versus={o: difference(finals[method], finals[o], test_images) for o in METHODS if o != method},
            effective_ratio=(_mean(r.pruned_share[0] for r in runs), _mean(r.pruned_share[1] for r in runs)),
            flops=(_mean(_step_flops(r, settings) for r in runs), _mean(r.flops[-1] / settings.epochs for r in runs)),
            seconds_ratio=quartiles(
                [
                    mine / full
                    for run, rival in zip(runs, by_method["full"], strict=True)
                    for mine, full in zip(run.seconds[pruned], rival.seconds[pruned], strict=True)
                ]
            ),
        )
    retention = {m: retention_rates(by_method[m]) for m in METHODS if m != "full"}
    return Summary(settings, len(digits.train_labels), test_images, methods, retention)


def difference(mine: Sequence[float], others: Sequence[float], test_images: int) -> Difference:
    """`mine` minus `others`, seed by seed, and whether that is more than noise."""
    from scipy.stats import t

    pairs = [a - b for a, b in zip(mine, others, strict=True)]
    mean, error = statistics.fmean(pairs), standard_error(pairs)
    if error is None:
        return Difference(mean, None, "one seed")
    noise = max(float(t.ppf(0.975, len(pairs) - 1)) * error, 1 / test_images)
    # The slack lets a difference of exactly one image be noise, whatever its last bit says.
    if abs(mean) <= noise * (1 + 1e-9):
        return Difference(mean, error, "noise")
    return Difference(mean, error, "higher" if mean > 0 else "lower")


def retention_rates(runs: Sequence[Record]) -> Tensor:
    """(N,) how often each training image was retained, of the pruned batches that it was in, over all seeds."""
    offered = torch.stack([r.offered for r in runs]).sum(0)
    retained = torch.stack([r.retained for r in runs]).sum(0)
    return retained / offered.clamp(min=1)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _mean(values: Any) -> float:
    return statistics.fmean(values)


def _step_flops(record: Record, settings: Settings) -> float:
    """The cost of a pruned epoch relative to a full one."""
    start, stop = settings.schedule.start, settings.schedule.stop
    assert stop is not None
    return (record.flops[stop - 1] - record.flops[start - 1]) / (stop - start)


# ------------------------------------------------------------------------ words


def table_rows(summary: Summary) -> list[tuple[str, ...]]:
    """The table's cells as text, a row per method, under `COLUMNS`."""
    return [_row(name, summary.methods[name]) for name in METHODS]


def _row(method: str, m: MethodSummary) -> tuple[str, ...]:
    low, median, high = m.seconds_ratio
    versus = m.versus.get("random")
    return (
        NAMES[method],
        plus_minus(m.mean, m.error),
        "" if versus is None else plus_minus(versus.mean, versus.error, sign=True),
        f"{m.effective_ratio[0]:.3f} / {m.effective_ratio[1]:.3f}",
        f"{m.flops[0]:.3f} / {m.flops[1]:.3f}",
        "1" if method == "full" else f"{median:.2f} [{low:.2f}, {high:.2f}]",
    )


def plus_minus(mean: float, error: float | None, sign: bool = False) -> str:
    """A share in percent with its standard error."""
    value = f"{100 * mean:+.2f}" if sign else f"{100 * mean:.2f}"
    return value if error is None else f"{value} ± {100 * error:.2f}"


def table_text(summary: Summary) -> str:
    """The table for a terminal."""
    rows = [COLUMNS, *table_rows(summary)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([lines[0], rule, *lines[1:]])


def headline(summary: Summary) -> str:
    """The result in one sentence."""
    d = summary.methods["pfb"].versus["random"]
    share = f"With {100 * summary.settings.prune_ratio:.0f} % of each batch pruned"
    points = f"{100 * abs(d.mean):.1f} points"
    if d.verdict == "higher":
        return f"{share}, PFB beat random pruning by {points}"
    if d.verdict == "lower":
        return f"{share}, random pruning beat PFB by {points}"
    if d.verdict == "noise":
        return f"{share}, random pruning did as well as PFB, within noise"
    return f"{share}, PFB ended {_apart(d)} random pruning, on one seed"


def reading(summary: Summary) -> list[str]:
    """What the numbers say, in plain sentences."""
    return [_accuracy_sentence(summary), _cost_sentence(summary), _full_sentence(summary), _toy_sentence(summary)]


def _accuracy_sentence(summary: Summary) -> str:
    d = summary.methods["pfb"].versus["random"]
    numbers = f"{plus_minus(d.mean, d.error, sign=True)} points, about {_images(d, summary)}"
    if d.verdict == "one seed":
        return f"PFB against random: {numbers}; a single seed cannot tell whether that is more than noise."
    n = len(summary.methods["pfb"].accuracies)
    if d.verdict == "noise":
        return f"As far as {n} seeds can tell, random did as well as PFB: the difference ({numbers}) is within noise."
    better, worse = ("PFB", "random") if d.verdict == "higher" else ("Random", "PFB")
    return f"{better} was better than {worse} here: PFB against random is {numbers}, more than the noise of {n} seeds."


def _cost_sentence(summary: Summary) -> str:
    pfb, random = summary.methods["pfb"], summary.methods["random"]
    text = (
        f"A pruned step cost {pfb.flops[0]:.3f} of a full one in FLOPs with PFB and {random.flops[0]:.3f} with random, "
        f"which never looks at what it prunes; in wall time {pfb.seconds_ratio[1]:.2f} and "
        f"{random.seconds_ratio[1]:.2f}; over the whole run {pfb.flops[1]:.3f} and {random.flops[1]:.3f} in FLOPs."
    )
    if pfb.versus["random"].verdict in ("noise", "lower"):
        text += " So the probe bought nothing that shows here."
    return text


def _full_sentence(summary: Summary) -> str:
    parts = [
        f"{NAMES[m]} ended {_apart(summary.methods[m].versus['full'])} full data "
        f"({_judgement(summary.methods[m].versus['full'])})"
        for m in ("pfb", "random")
    ]
    return f"{' and '.join(parts)}."


def _toy_sentence(summary: Summary) -> str:
    return (
        f"This is a toy ({summary.train_images:,} training images of 8 x 8 px digits, {summary.test_images:,} test "
        f"images, {summary.settings.epochs} epochs): it shows how the method works and what it costs, not how it ranks."
    )


def _apart(d: Difference) -> str:
    if d.mean == 0:
        return "level with"
    return f"{100 * abs(d.mean):.2f} points {'above' if d.mean > 0 else 'below'}"


def _judgement(d: Difference) -> str:
    return {"noise": "within noise", "one seed": "one seed"}.get(d.verdict, "more than noise")


def _images(d: Difference, summary: Summary) -> str:
    count = round(abs(d.mean) * summary.test_images)
    return f"{count} of {summary.test_images} test images"


# -------------------------------------------------------------------- to a file


def as_json(summary: Summary, records: Sequence[Record], digits: Digits, environment: dict[str, Any]) -> dict[str, Any]:
    """All numbers as plain values."""
    schedule = summary.settings.schedule
    return {
        "headline": headline(summary),
        "reading": reading(summary),
        "environment": environment,
        "settings": {
            **asdict(summary.settings),
            "pruned_epochs": [schedule.start, schedule.stop],
            "train_images": summary.train_images,
            "test_images": summary.test_images,
        },
        "methods": {name: asdict(m) for name, m in summary.methods.items()},
        "runs": [_record_json(r) for r in records],
        "images": [
            {"label": int(label), "retained_by_pfb": float(pfb), "retained_by_random": float(random)}
            for label, pfb, random in zip(
                digits.train_labels, summary.retention["pfb"], summary.retention["random"], strict=True
            )
        ],
    }


def _record_json(record: Record) -> dict[str, Any]:
    per_image = {"offered", "retained"}
    return {k: v for k, v in vars(record).items() if k not in per_image}
