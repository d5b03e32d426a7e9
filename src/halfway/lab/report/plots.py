"""The report's figures: functions that draw them, see `page.figure`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..comparison.results import Row
from ..comparison.trials import Group
from ..comparison.verdict import name
from ..recipes.methods import CONTROLS
from ..training.run_result import RunResult
from .counts import Counts
from .page import Draw, Theme, rate_edges
from .runs import Groups

MANY_CLASSES = 40
SHOWN_OF_MANY = 15
_STYLES = ("-", "--", ":", "-.")


def score_by_setting(rows: Sequence[Row], key: str, score: str) -> Draw:
    """Final score against a swept setting: the mean, and a band from the worst to the best seed. Methods that ignore
    the setting are bands across the whole width."""

    def draw(axes: Any, theme: Theme) -> None:
        colours = theme.colours([row.group.method for row in rows])
        lines: dict[tuple[str, float | None], list[tuple[float, Row]]] = {}
        for row in rows:
            colour = colours[row.group.method]
            settings = dict(row.group.settings)
            if key in settings:
                lines.setdefault((row.group.method, row.group.ratio), []).append((float(settings[key]), row))
                continue
            axes.axhspan(min(row.scores.values()), max(row.scores.values()), color=colour, alpha=0.16, lw=0)
            axes.axhline(row.mean, color=colour, lw=1.4, ls=(0, (4, 3)), label=short(row.group))
        every = sorted({x for points in lines.values() for x, _ in points})
        for (method, ratio), points in lines.items():
            points.sort(key=lambda point: point[0])
            x, group_rows = [p[0] for p in points], [p[1] for p in points]
            low, high = ([pick(r.scores.values()) for r in group_rows] for pick in (min, max))
            axes.fill_between(x, low, high, color=colours[method], alpha=0.2, lw=0)
            label = short(Group(method, ratio))
            axes.plot(x, [r.mean for r in group_rows], "o-", color=colours[method], lw=2, ms=5, label=label)
        if every[0] > 0 and every[-1] / every[0] > 30:
            axes.set_xscale("log")
            axes.minorticks_off()
        axes.set_xlabel(key)
        axes.set_ylabel(score)
        axes.grid(axis="y", color=theme.faint, lw=0.8)
        axes.legend(loc="best", fontsize=9)

    return draw


# ----------------------------------------------------------------------- curves


def curves(groups: Groups, value: str, title: str) -> Draw:
    """A metric over the training: thin lines are seeds, thick ones their mean; the pruning window is shaded.

    value: a key of the rounds' metrics; rounds without it are left out.
    """

    def draw(axes: Any, theme: Theme) -> None:
        recipes = [run.recipe for seeds in groups.values() for run in seeds.values()]
        recipe = recipes[0]
        pruned = [r for r in recipes if r.prunes and r.method not in CONTROLS]
        windows = {(start, r.length if stop is None else stop) for r in pruned for start, stop in [r.window]}
        if len(windows) == 1:
            axes.axvspan(*windows.pop(), color=theme.faint, alpha=0.45, lw=0)
        colours = theme.colours([group.method for group in groups])
        ratios = sorted({group.ratio for group in groups if group.ratio is not None})
        named: set[str] = set()
        for group, seeds in groups.items():
            colour = colours[group.method]
            style = "-" if group.ratio is None else _STYLES[ratios.index(group.ratio) % len(_STYLES)]
            lines = [_curve(run, value) for run in seeds.values()]
            if len(lines) > 1:
                for x, y in lines:
                    axes.plot(x, y, color=colour, ls=style, lw=0.7, alpha=0.35)
            label = short(Group(group.method, group.ratio))
            x, y = _mean(lines)
            few = "o" if len(x) <= 12 else None
            shown = label if label not in named else None
            axes.plot(x, y, color=colour, ls=style, lw=1.9, marker=few, ms=3.5, label=shown)
            named.add(label)
        axes.set_xlabel(f"{recipe.unit} (shaded: {recipe.unit}s that prune)")
        axes.set_ylabel(title)
        axes.grid(axis="y", color=theme.faint, lw=0.8)
        axes.set_xlim(left=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(loc="best", fontsize=8.5, ncols=2 if len(named) > 4 else 1, handlelength=2.9)

    return draw


def _curve(run: RunResult, value: str) -> tuple[list[float], list[float]]:
    across = "epoch" if run.recipe.unit == "epoch" else "step"
    points = [(m[across], m[value]) for m in run.metrics if value in m]
    return [p[0] for p in points], [p[1] for p in points]


def _mean(lines: Sequence[tuple[list[float], list[float]]]) -> tuple[list[float], list[float]]:
    """The mean over seeds, which all have the same rounds."""
    return lines[0][0], [sum(values) / len(values) for values in zip(*(y for _, y in lines), strict=True)]


# -------------------------------------------------------------------- retention


def shown_classes(rates: Tensor) -> list[int | None]:
    """Classes from the least to the most retained; if there are many, only both ends, with None between."""
    order = [int(c) for c in rates.argsort(stable=True) if math.isfinite(float(rates[c]))]
    if len(order) <= MANY_CLASSES:
        return list(order)
    return [*order[:SHOWN_OF_MANY], None, *order[-SHOWN_OF_MANY:]]


def retention_by_class(counts: dict[Group, Counts], main: Group, names: Sequence[str]) -> Draw:
    """A row per class, a dot per group that selects; random's share is a line from top to bottom."""

    def draw(axes: Any, theme: Theme) -> None:
        classes = shown_classes(counts[main].class_rates)
        colours = theme.colours([group.method for group in counts])
        for group in sorted(counts, key=lambda group: group != main):
            found, colour = counts[group], colours[group.method]
            if group.method == "random":
                axes.axvline(100 * found.share, color=colour, lw=1.8, label=_once(axes, "random pruning"), zorder=1)
                continue
            rates = found.class_rates
            axes.plot(
                [math.nan if c is None else 100 * float(rates[c]) for c in classes],
                range(len(classes)),
                "o-" if group == main else "o--",
                color=colour,
                lw=1,
                ms=6.5 if group == main else 4,
                alpha=1 if group == main else 0.55,
                label=_once(axes, name(group.method)),
                zorder=2,
            )
        for ratio in sorted({group.ratio for group in counts if group.ratio is not None}):
            axes.annotate(
                f"p = {ratio:g}",
                (100 * (1 - ratio), 1),
                (0, 5),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color=theme.text,
            )
        axes.set_yticks(range(len(classes)), ["…" if c is None else _short_name(names[c]) for c in classes])
        axes.set_ylim(len(classes) - 0.3, -0.7)
        axes.set_xlabel("retained of the samples in pruned batches, %")
        axes.grid(axis="y", color=theme.faint, lw=0.8)
        axes.margins(x=0.1)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.5 / _class_height(len(classes))), ncols=4, fontsize=9)

    return draw


def _class_height(rows: int) -> float:
    """Height in inches of a figure with a row per class."""
    return max(3.2, 1.3 + 0.19 * rows)


def class_height(counts: Counts) -> float:
    """Height in inches of the figures that show the classes of these counts."""
    return _class_height(len(shown_classes(counts.class_rates)))


def retention_over_time(counts: Counts, names: Sequence[str], unit: str, units_per_round: int) -> Draw:
    """A heat map, classes by time: where more than the mean is retained, and where less."""

    def draw(axes: Any, theme: Theme) -> None:
        import numpy as np
        from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

        classes = shown_classes(counts.class_rates)
        rates, rounds = counts.class_rates_over_time(at_most=40)
        table = np.full((len(classes), len(rates)), np.nan)
        for y, c in enumerate(classes):
            if c is not None:
                table[y] = 100 * rates[:, c].numpy()
        middle = 100 * counts.share
        reach = max(float(np.nanmax(np.abs(table - middle))), 1.0)
        less, more = theme.known["random"], theme.known["pfb"]
        colours = LinearSegmentedColormap.from_list("retained", [less, theme.faint, more])
        image = axes.imshow(
            table,
            cmap=colours,
            norm=TwoSlopeNorm(middle, middle - reach, middle + reach),
            aspect="auto",
            interpolation="none",
        )
        steps = sorted(set(np.linspace(0, len(rates) - 1, min(len(rates), 7)).round().astype(int).tolist()))
        axes.set_xticks(steps, [f"{int(rounds[i, 1]) * units_per_round}" for i in steps])
        axes.set_yticks(range(len(classes)), ["…" if c is None else _short_name(names[c]) for c in classes])
        axes.spines[:].set_visible(False)
        axes.set_xlabel(unit)
        bar = axes.figure.colorbar(image, ax=axes, shrink=0.75, pad=0.02)
        bar.outline.set_visible(False)
        bar.set_label("retained, %")

    return draw


def retention_histogram(counts: dict[Group, Counts]) -> Draw:
    """How unevenly retention falls on samples: a method's choice beside pure chance."""

    def draw(axes: Any, theme: Theme) -> None:
        offers = {c.offers for c in counts.values()}
        # No fine bins hold equally many rates k / 12 and equally many rates k / 18.
        edges = rate_edges(offers.pop()) if len(offers) == 1 else [10.0 * k - 5 for k in range(12)]
        colours = theme.colours([group.method for group in counts])
        for group, found in counts.items():
            rates = (100 * found.rates[found.offered > 0]).clamp(max=edges[-1]).tolist()
            colour = colours[group.method]
            axes.hist(rates, edges, color=colour, alpha=0.25, lw=0)
            axes.hist(rates, edges, color=colour, histtype="step", lw=2, label=name(group.method))
        axes.set_xlabel("pruned batches in which a sample was retained, %")
        axes.set_ylabel("training samples")
        axes.set_xlim(edges[0], edges[-1])
        axes.grid(axis="y", color=theme.faint, lw=0.8)
        axes.legend(loc="upper right")

    return draw


def short(group: Group) -> str:
    """A group's name in a legend."""
    return name(group.method) if group.ratio is None else f"{name(group.method)}, p = {group.ratio:g}"


def _short_name(text: str) -> str:
    return text if len(text) <= 18 else text[:17] + "…"


def _once(axes: Any, label: str) -> str | None:
    """The label, if no line has it yet: a legend names everything once."""
    return None if label in axes.get_legend_handles_labels()[1] else label
