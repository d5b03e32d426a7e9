"""The report's section on who pays for the pruning: retention by class, over time, and by sample."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..comparison.trials import Group
from ..comparison.verdict import PFB, at, name
from ..progress import Bar
from . import page, plots
from .counts import Counts, read
from .pictures import Pictures, class_names
from .runs import Runs


def read_counts(runs: Runs) -> dict[Group, Counts]:
    """The counts of the groups that the section shows: PFB and random pruning at all ratios, other methods at the ratio
    of the galleries, all with the settings of the galleries; over the same seeds where possible."""
    main = runs.main
    if main is None:
        return {}
    shown = [
        group
        for group in runs.groups
        if group.ratio is not None
        and group.settings == main.rival(group.method).settings
        and (group.method in (PFB, "random") or group.ratio == main.ratio)
    ]
    found = {}
    with Bar(len(shown), "reading checkpoints", "group", leave=False) as bar:
        for group in shown:
            seeds = runs.groups[group]
            same = [seed for seed in runs.main_seeds if seed in seeds] or list(seeds)
            counts = read(seeds[seed].path for seed in same)
            bar.update()
            if counts is not None:
                found[group] = counts
    return found


def section(runs: Runs, counts: dict[Group, Counts], pictures: Pictures) -> dict[str, Any] | None:
    """Figures and numbers of the section; None if PFB pruned nothing."""
    main = runs.main
    if main is None or main not in counts:
        return None
    both = {group: counts[group] for group in (main.rival("random"), main) if group in counts}
    return {
        "intro": chosen(runs, main),
        "ratio": f"{main.ratio:g}",
        "by_class": _by_class(runs, counts, main, pictures),
        "by_sample": _by_sample(both, main),
        "methods": [{"method": group.method, "name": name(group.method)} for group in both],
        "numbers": [{"what": what, "of": values} for what, values in _numbers(both)],
    }


def _by_class(runs: Runs, counts: dict[Group, Counts], main: Group, pictures: Pictures) -> list[page.PageFigure]:
    """Two figures; none where classes are unknown."""
    mine = counts[main]
    if not mine.class_offered.numel():
        return []
    names = class_names(runs.recipe, pictures, mine.class_offered.shape[1])
    rates, height = mine.class_rates, plots.class_height(mine)
    classes = plots.shown_classes(rates)
    text = ", ".join(f"{names[c]} {page.percent(rates[c])}" for c in classes if c is not None)
    end = plots.SHOWN_OF_MANY
    part = f" The {end} least and the {end} most retained of {len(names)} classes." if None in classes else ""
    return [
        page.figure(
            "Retention per class",
            plots.retention_by_class({g: c for g, c in counts.items() if g in runs.shown}, main, names),
            f"Dot plot of the share of each class that was retained by {main.label}: {text}.",
            f"Large dots: {plots.short(main)}. PFB does not look at labels, so classes that look alike at the "
            f"cut can be thinned more than others.{part}",
            height,
        ),
        page.figure(
            f"Retention per class over time, {plots.short(main)}",
            plots.retention_over_time(mine, names, runs.recipe.unit, runs.recipe.log_every),
            f"Heat map of the share of each class retained by {main.label}, over {runs.recipe.unit}s.",
            f"Colour: more or less than the mean of {page.percent(mine.share)}.{part}",
            height,
        ),
    ]


def _by_sample(both: dict[Group, Counts], main: Group) -> page.PageFigure:
    spread = ", ".join(f"{name(g.method)} {page.percent(_spread(c), 1)}" for g, c in both.items())
    return page.figure(
        f"Retention per sample, p = {main.ratio:g}",
        plots.retention_histogram(both),
        f"Histogram of the share of pruned batches in which a sample was retained. Standard deviation: {spread}.",
        "The wider the curve, the more the same samples are pruned again and again.",
    )


def _numbers(counts: dict[Group, Counts]) -> list[tuple[str, list[str]]]:
    """How unevenly the pruning falls, a column per method."""
    lines = [
        ("samples offered", [f"{int((c.offered > 0).sum()):,}" for c in counts.values()]),
        ("times each, median", [f"{c.offers:,}" for c in counts.values()]),
        ("retained, mean", [page.percent(c.share, 1) for c in counts.values()]),
        ("standard deviation", [page.percent(_spread(c), 1) for c in counts.values()]),
        ("always retained", [_how_many(c, c.retained == c.offered) for c in counts.values()]),
        ("never retained", [_how_many(c, c.retained == 0) for c in counts.values()]),
    ]
    if all(c.class_offered.numel() for c in counts.values()):
        lines.append(("least retained class", [page.percent(_finite(c.class_rates).min(), 1) for c in counts.values()]))
        lines.append(("most retained class", [page.percent(_finite(c.class_rates).max(), 1) for c in counts.values()]))
    return lines


def _spread(counts: Counts) -> Tensor:
    return counts.rates[counts.offered > 0].std(correction=0)


def _how_many(counts: Counts, which: Tensor) -> str:
    return page.percent((which & (counts.offered > 0)).sum() / (counts.offered > 0).sum(), 1)


def _finite(values: Tensor) -> Tensor:
    return values[values.isfinite()]


def chosen(runs: Runs, main: Group) -> str:
    """Which group the section is about, and why."""
    several = sum(group.method == PFB for group in runs.groups) > 1
    why = ", the ratio nearest to 0.5" if several else ""
    return f"{name(main.method)}{at(main)}{why}; counts are summed over n = {len(runs.main_seeds)} seed(s)."
