"""The demo's figures: functions that draw them, see `page.render`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..report.page import Draw, Theme, rate_edges
from .demo import METHODS, Digits, Record, Settings
from .summary import NAMES, Summary


def accuracy_by_epoch(records: Sequence[Record], summary: Summary) -> Draw:
    """Test accuracy after each epoch, with the pruned epochs shaded."""

    def draw(axes: Any, theme: Theme) -> None:
        schedule = summary.settings.schedule
        axes.axvspan(schedule.start + 0.5, (schedule.stop or 0) + 0.5, color=theme.faint, alpha=0.45, lw=0)
        _curves(axes, theme, records, summary, lambda r: [float(e + 1) for e in range(len(r.accuracy))])
        axes.set_xlabel("epoch (shaded: epochs that prune)")
        axes.xaxis.get_major_locator().set_params(integer=True)

    return draw


def accuracy_by_cost(records: Sequence[Record], summary: Summary) -> Draw:
    """Test accuracy against the FLOPs spent so far."""

    def draw(axes: Any, theme: Theme) -> None:
        _curves(axes, theme, records, summary, lambda r: r.flops)
        axes.set_xlabel("FLOPs spent, in epochs of full training")
        axes.set_xlim(left=0)

    return draw


def _curves(
    axes: Any, theme: Theme, records: Sequence[Record], summary: Summary, across: Callable[[Record], list[float]]
) -> None:
    """A thin line per seed, a thick one for their mean, a dot where the training ends."""
    ceiling = 1 - 0.5 / summary.test_images
    for method in METHODS:
        runs, color = [r for r in records if r.method == method], theme.known[method]
        for run in runs:
            axes.plot(across(run), [_stretch(a, ceiling) for a in run.accuracy], color=color, lw=0.8, alpha=0.4)
        x, y = _mean_over(runs, across), _mean_over(runs, lambda r: r.accuracy)
        stretched = [_stretch(a, ceiling) for a in y]
        axes.plot(x, stretched, color=color, lw=2.2, label=NAMES[method], solid_capstyle="round")
        axes.plot(x[-1], stretched[-1], "o", color=color, ms=6)
    ticks = [0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995]
    axes.set_yticks([_stretch(t, ceiling) for t in ticks], [f"{100 * t:g} %" for t in ticks])
    # Early epochs near chance would squeeze what is worth seeing.
    best = max(a for r in records for a in r.accuracy)
    axes.set_ylim(_stretch(0.3 if best > 0.5 else 0, ceiling), _stretch(best, ceiling) + 0.15)
    axes.grid(axis="y", color=theme.faint, lw=0.8)
    axes.legend(loc="lower right")


def _stretch(accuracy: float, ceiling: float) -> float:
    """Equal steps for equal factors in the error: 90, 99 and 99.9 % lie evenly apart."""
    return -math.log10(1 - min(accuracy, ceiling))


def _mean_over(runs: Sequence[Record], values: Callable[[Record], list[float]]) -> list[float]:
    return [sum(v) / len(v) for v in zip(*(values(r) for r in runs), strict=True)]


def retention_by_class(summary: Summary, digits: Digits) -> Draw:
    """How much of each class PFB retained, with random's share as a line across."""

    def draw(axes: Any, theme: Theme) -> None:
        rates = class_rates(summary.retention["pfb"], digits.train_labels)
        axes.bar(list(rates), [100 * r for r in rates.values()], color=theme.known["pfb"], width=0.72)
        random = float(summary.retention["random"].mean())
        axes.axhline(100 * random, color=theme.known["random"], lw=2, label="random, any class")
        for digit, rate in rates.items():
            axes.annotate(
                f"{100 * rate:.0f}", (digit, 0), (0, 5), textcoords="offset points", ha="center", color=theme.on_bars
            )
        axes.set_xticks(list(rates))
        axes.set_xlabel("digit")
        axes.set_ylabel("retained by PFB, %")
        axes.margins(y=0.15)
        axes.legend(loc="upper right")

    return draw


def class_rates(rates: Tensor, labels: Tensor) -> dict[int, float]:
    """The mean retention rate of each class."""
    return {int(c): float(rates[labels == c].mean()) for c in labels.unique()}


def rate_bins(settings: Settings, at_most: int = 25) -> list[float]:
    """Edges of the histogram of retention rates, in percent."""
    schedule = settings.schedule
    offers = settings.seeds * round(schedule.share(settings.epochs) * settings.epochs)
    return rate_edges(offers, at_most)


def retention_histogram(summary: Summary) -> Draw:
    """How unevenly retention falls on images: PFB's choice beside pure chance."""

    def draw(axes: Any, theme: Theme) -> None:
        edges = rate_bins(summary.settings)
        for method in ("random", "pfb"):
            percent = (100 * summary.retention[method]).tolist()
            color = theme.known[method]
            axes.hist(percent, edges, color=color, alpha=0.25, lw=0)
            axes.hist(percent, edges, color=color, histtype="step", lw=2, label=NAMES[method])
        axes.set_xlabel("pruned batches in which an image was retained, %")
        axes.set_ylabel("training images")
        axes.grid(axis="y", color=theme.faint, lw=0.8)
        axes.legend(loc="upper right")

    return draw
