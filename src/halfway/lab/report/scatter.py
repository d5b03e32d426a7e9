"""The main plot: score against cost, with curves for random pruning, in its window and without, and for fewer steps.

The page itself draws it, not matplotlib: positions are percentages of the plot, so that letters keep their size in a
narrow window, and every dot reacts to the pointer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ..comparison.results import Row
from ..comparison.trials import Group
from ..comparison.verdict import against, name

# Shapes, used in turn for methods beyond the palette.
SHAPES = (
    "M-5.5,0a5.5,5.5 0 1,0 11,0a5.5,5.5 0 1,0 -11,0z",
    "M-5,-5h10v10h-10z",
    "M0,-6.5L6.5,5h-13z",
    "M0,-7L7,0L0,7L-7,0z",
)
PALETTE = 8
CURVES = {
    "random": "random pruning per batch",
    "random_even": "random pruning without window",
    "shorter": "full data for fewer steps",
    "full": "full data for fewer epochs",  # in older comparisons
}
FEW = 12  # dots that have room for a label


def score_by_cost(rows: Sequence[Row], score: str, unit: str) -> dict[str, Any]:
    """What `page.html` draws. score: what the score is. unit: of the runs' length, "epoch" or "step"."""
    x = _scale([row.cost for row in rows], 0.06)
    y = _scale([row.mean + sign * (row.error or 0) for row in rows for sign in (-1, 1)], 0.08)
    methods = list(dict.fromkeys(row.group.method for row in rows))
    others = [method for method in methods if method not in ("full", "random", "pfb")]
    shapes = {m: SHAPES[others.index(m) // PALETTE % len(SHAPES)] if m in others else SHAPES[0] for m in methods}
    curves = [curve for method in CURVES for curve in _curves(rows, x, y, method)]
    return {
        "y_title": score,
        "x_ticks": _ticks([row.cost for row in rows], x),
        "y_ticks": [{"at": _down(t["value"], y), "text": t["text"]} for t in _ticks([row.mean for row in rows], y)],
        "curves": curves,
        "titles": {method: CURVES[method] for method in dict.fromkeys(curve["method"] for curve in curves)},
        "dots": len(others) <= PALETTE,
        "marks": [{"method": m, "title": name(m), "shape": shapes[m]} for m in methods],
        "points": [_point(row, x, y, shapes[row.group.method], unit if len(rows) <= FEW else None) for row in rows],
        "alt": "Score against FLOPs of the whole run relative to full data. "
        + "; ".join(f"{r.group.label}: {r.mean:.2f} % at {r.cost:.3f} (n = {len(r.scores)})" for r in rows),
    }


Scale = Callable[[float], float]


def _scale(values: Sequence[float], margin: float) -> Scale:
    """Values to shares of an axis, with a margin at both ends."""
    low, high = min(values), max(values)
    room = margin * (high - low) or 1.0
    return lambda value: (value - low + room) / (high - low + 2 * room)


def _right(value: float, x: Scale) -> str:
    return f"{100 * x(value):.2f}%"


def _down(value: float, y: Scale) -> str:
    return f"{100 * (1 - y(value)):.2f}%"


def _ticks(values: Sequence[float], scale: Scale) -> list[dict[str, Any]]:
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(5).tick_values(min(values), max(values)) if len(set(values)) > 1 else values[:1]
    return [{"value": t, "at": _right(t, scale), "text": f"{t:g}"} for t in map(float, found) if 0 <= scale(t) <= 1]


def _curves(rows: Sequence[Row], x: Scale, y: Scale, method: str) -> list[dict[str, Any]]:
    """A line through a method's dots and full data of all epochs, for each setting that has at least two of them."""
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.group.method in (method, "full"):
            short = dict(row.group.settings).get("length") is not None
            if row.group.method == method or not short:
                lines.setdefault(_but_length(row.group), []).append(row)
    curves = []
    for line in lines.values():
        line.sort(key=lambda row: row.cost)
        if len({row.cost for row in line}) > 1 and any(row.group.method == method for row in line):
            pieces = [
                {"x1": _right(a.cost, x), "y1": _down(a.mean, y), "x2": _right(b.cost, x), "y2": _down(b.mean, y)}
                for a, b in itertools.pairwise(line)
            ]
            curves.append({"method": method, "pieces": pieces})
    return curves


def _but_length(group: Group) -> tuple[Any, ...]:
    return tuple((key, value) for key, value in group.rival_full.settings if key != "length")


def _point(row: Row, x: Scale, y: Scale, shape: str, unit: str | None) -> dict[str, Any]:
    """unit: None where there is no room for labels."""
    error = "" if row.error is None else f" ± {row.error:.2f}"
    lines = [f"{row.group.label}", f"{row.mean:.2f}{error} % (n = {len(row.scores)}) at {row.cost:.3f} of the FLOPs"]
    for d, rival in (
        (row.minus_random, "random, same ratio"),
        (row.minus_random_at_cost, "random, same cost"),
        (row.minus_full, "full data"),
    ):
        if d is not None:
            lines.append(against(d, rival))
    for control, standing in row.controls.items():
        equal = f", reached at {standing.equivalent} of the FLOPs" if standing.equivalent else ""
        lines.append(f"{against(standing.difference, f'{name(control)}, same cost')}{equal}")
    ratio = [] if row.group.ratio is None else [f"p = {row.group.ratio:g}"]
    settings = [f"{value:,} {unit}s" if key == "length" else str(value) for key, value in row.group.settings]
    return {
        "label": row.group.label,
        "method": row.group.method,
        "x": _right(row.cost, x),
        "y": _down(row.mean, y),
        "low": None if row.error is None else _down(row.mean - row.error, y),
        "high": None if row.error is None else _down(row.mean + row.error, y),
        "shape": shape,
        "text": "" if unit is None else ", ".join([*ratio, *settings]),
        # Random pruning is cheaper and lies to the left, so its labels go there.
        "left": row.group.method in ("random", "random_even"),
        "tip": "\n".join(lines),
    }
