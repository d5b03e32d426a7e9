"""The report of a comparison, or of single runs: one HTML page, see `page`.

Everything but pictures and centroids comes from the run folders; if those are gone, `results.json` alone gives the
table and the first figure. Pictures and centroids need the data set; if it is gone, the page says so in their place.
Centroids also need the model. One that is not halfway's own is built only on request, because a report may be about
other people's results.

Sections are functions that return plain values, which `page.html` renders. Begin reading there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..comparison import table, verdict
from ..comparison.results import Row
from . import page, plots, scatter
from .cells import first_number
from .gallery import centroid_gallery, galleries
from .method import how_it_was_measured
from .pictures import load_pictures
from .retention import read_counts
from .retention import section as retention_section
from .runs import Runs, how_to_go_on, read


def write(runs: Runs, root: str | None, title: str | None, trust: bool = False) -> str:
    """The page.

    Args:
        root: where the data are; None: where they were in training.
        title: the line above the headline; None: the recipe's name.
        trust: import and build whatever models the runs name.
    """
    rows, recipe = runs.rows, runs.recipe
    score = f"{recipe.score_name}, %"
    return page.render(
        page.method_style(runs.methods),
        over=title or f"halfway report · {recipe.name}",
        headline=verdict.headline(rows),
        scale=_scale(runs),
        sentences=verdict.reading(rows),
        plot=scatter.score_by_cost(rows, score, recipe.unit) if len(rows) > 1 else None,
        unfinished=_unfinished(runs),
        table=_table(rows),
        notes=table.notes(rows, recipe, runs.session, runs.timing),
        sweep=_sweep(runs, score),
        unit=recipe.unit,
        command=runs.command,
        **_from_run_folders(runs, root, trust),
    )


def _from_run_folders(runs: Runs, root: str | None, trust: bool) -> dict[str, Any]:
    """The sections that need more than `results.json`."""
    if not runs.groups:
        return dict.fromkeys(("curves", "retention", "galleries", "centroids", "method"))
    counts = read_counts(runs)
    pictures = load_pictures(runs.example.recipe, root, len(counts[runs.main].offered) if runs.main in counts else None)
    return {
        "curves": _curves(runs),
        "retention": retention_section(runs, counts, pictures),
        "galleries": galleries(runs, counts, pictures),
        "centroids": centroid_gallery(runs, pictures, trust),
        "method": how_it_was_measured(runs),
    }


def _scale(runs: Runs) -> str:
    """What was trained, on which data, and whether it is a twin of one of the paper's settings."""
    title = runs.recipe.title
    size = ["reduced scale"] if runs.recipe.name.startswith("tiny-") else []
    return " · ".join([title[:1].upper() + title[1:], runs.session["data"], *size])


def _table(rows: Sequence[Row]) -> dict[str, Any]:
    """The table without empty columns. Cells sort by the first number in them."""
    every = [table.cells(row) for row in rows]
    filled = [i for i in range(len(table.COLUMNS)) if any(line[i] for line in every)]
    lines = []
    for place, (row, cells) in enumerate(zip(rows, every, strict=True)):
        shown = [{"text": cells[i].replace("p = ", "p\u00a0=\u00a0"), "sort": first_number(cells[i])} for i in filled]
        lines.append({"method": row.group.method, "label": row.group.label, "place": len(rows) - place, "cells": shown})
    return {"header": [table.COLUMNS[i] for i in filled], "rows": lines}


def _unfinished(runs: Runs) -> dict[str, Any] | None:
    if not runs.unfinished:
        return None
    return {
        "runs": [{"name": run.path.name, "progress": _progress(run.metrics, run.steps)} for run in runs.unfinished],
        "commands": list(dict.fromkeys(how_to_go_on(run) for run in runs.unfinished)),
    }


def _progress(metrics: list[dict[str, float]], steps: int) -> str:
    return f"{metrics[-1]['step'] / steps:.0%} trained" if metrics and steps else "not a round yet"


def _sweep(runs: Runs, score: str) -> page.PageFigure | None:
    if runs.sweep is None:
        return None
    return page.figure(
        f"Score by {runs.sweep}",
        plots.score_by_setting(runs.rows, runs.sweep, score),
        f"Final score against {runs.sweep}; the table has the numbers.",
        "Lines: mean over seeds; bands: from the worst seed to the best. Bands across the whole width: methods that do "
        "not look at this setting.",
        height=4.1,
    )


def _curves(runs: Runs) -> list[page.PageFigure]:
    unit = runs.recipe.unit
    shown = runs.shown
    groups = "; ".join(f"{group.label} (n = {len(seeds)})" for group, seeds in shown.items())
    left_out = len(runs.methods) - len({group.method for group in shown})
    note = f" The best of {len(runs.methods)} methods, beside full data, random and PFB." if left_out else ""
    return [
        page.figure(
            "Score",
            plots.curves(shown, "score", f"{runs.recipe.score_name.partition(',')[0]}, %"),
            f"Line plot of the score on test images over {unit}s. {groups}.",
            f"Thin lines are seeds, thick ones their mean; dots where the model was evaluated.{note}",
        ),
        page.figure(
            "Training loss",
            plots.curves(shown, "loss", "loss of the samples trained on"),
            f"Line plot of the training loss over {unit}s. {groups}.",
            "Of retained samples only, while a method prunes: a selection of hard samples has a higher loss without "
            "being worse for the model.",
        ),
    ]


__all__ = ["Runs", "load_pictures", "read", "write"]
