"""The map as a picture: what methods gain over the better control along each ladder, in points and as cost.

One panel per ladder and measure, on a white ground. Colours are Okabe and Ito's, which most colour-blind people tell
apart, and each line has a marker of its own. The legend stands below the panels, where no data are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..report.page import LIGHT, minus, style
from .gains import Gain, of_ladders
from .results import Study

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D", "#7A5C00")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_STYLES = ("-", "--")
_SETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "fashion-mnist": "Fashion-MNIST"}
# A gain far below the others would press them all into a line: it is drawn at the edge, with its number.
LOWEST = -5.0
_WHITE = {"facecolor": "white", "lw": 0, "pad": 0.4}
_LINE = 0.45  # height of such a number, in points of the score
_DODGE = 0.07  # between the intervals of two methods, in doublings of the passes


@dataclass(frozen=True)
class Mark:
    """A point of a line: where it is drawn, its interval, and whether the true value lies beyond."""

    x: float
    y: float
    low: float
    high: float
    beyond: bool


def stage_of(study: Study, wanted: Sequence[str]) -> str | None:
    """The stage that the picture shows: that with a primary family, else the one with most gains on ladders; None if
    there is no gain yet."""
    known = {name: sum(map(len, of_ladders(study.gains[name]).values())) for name in wanted}
    known = {name: count for name, count in known.items() if count}
    primary = [name for name in known if study.stages[name].get("primary")]
    return next(iter(primary), max(known, key=lambda name: known[name], default=None))


def draw(study: Study, stage: str, targets: Sequence[Path | IO[bytes]]) -> None:
    """Write the picture to each target: a file in the format that its ending names, or a stream, as SVG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ladders = of_ladders(study.gains[stage])
    names = list(dict.fromkeys(each.arm.name for members in ladders.values() for each in members))
    looks = {name: _look(i) for i, name in enumerate(names)}
    on = next(iter(ladders.values()))[0].arm.recipe.data.evaluate
    lines = -(-len(names) // 4)
    with rc_context({**style(LIGHT), "font.size": 10}):
        figure = Figure(figsize=(8.8, 6.0 + 0.24 * lines), layout="constrained", facecolor="white")
        layout: Any = figure.get_layout_engine()
        layout.set(h_pad=0.12, w_pad=0.06)  # room for the lines above the panels
        axes = figure.subplots(2, len(ladders), squeeze=False, sharex="col")
        for column, (ladder, members) in enumerate(ladders.items()):
            data = members[0].arm.recipe.data.name
            axes[0, column].set_title(f"{ladder}: {_SETS.get(data, data)}", loc="left", fontsize=11, pad=18)
            _gains(axes[0, column], members, looks)
            _costs(axes[1, column], members, looks)
            _passes(axes[1, column], members)
        axes[0, 0].set_ylabel(f"gain at equal cost, points ({on})")
        axes[1, 0].set_ylabel("equivalent cost / own cost")
        handles = [axes[0, 0].plot([], [], label=name, ms=5, lw=1.8, **look)[0] for name, look in looks.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(names)), fontsize=9.5)
        for target in targets:
            kind = target.suffix[1:] if isinstance(target, Path) else "svg"
            more: dict[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": 150}
            figure.savefig(target, format=kind, facecolor="white", **more)


def _look(i: int) -> dict[str, Any]:
    """Distinct for the first 16 methods."""
    turn = i // len(_COLOURS)
    return {
        "color": _COLOURS[i % len(_COLOURS)],
        "marker": _MARKERS[(i + turn) % len(_MARKERS)],
        "ls": _STYLES[turn % len(_STYLES)],
    }


def _gains(axes: Any, members: Sequence[Gain], looks: Mapping[str, dict[str, Any]]) -> None:
    below: dict[float, int] = {}
    for name, marks in gain_marks(members, list(looks)).items():
        _line(axes, marks, looks[name])
        for mark, (x, gain) in zip(marks, _at(members, name), strict=True):
            if mark.beyond:
                below[x] = below.get(x, 0) + 1
                told = minus(f"{gain.mean:+.1f}")
                place = (x, LOWEST - _LINE * below[x])
                axes.text(*place, told, color=looks[name]["color"], fontsize=8.5, ha="center", va="center", bbox=_WHITE)
    _reference(axes, 0.0, "the better of random and fewer steps")
    if below:
        axes.set_ylim(bottom=LOWEST - _LINE * (max(below.values()) + 1))
    axes.yaxis.set_major_formatter(lambda value, _: minus(f"{value:+g}" if value else "0"))


def _costs(axes: Any, members: Sequence[Gain], looks: Mapping[str, dict[str, Any]]) -> None:
    for name, marks in cost_marks(members, list(looks)).items():
        _line(axes, marks, looks[name])
    _reference(axes, 1.0, "its own cost (hollow: the curve ends; none: it falls)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def gain_marks(members: Sequence[Gain], names: Sequence[str]) -> dict[str, list[Mark]]:
    """The points of each line. names: of all lines, for their places side by side."""
    made = {}
    for name in dict.fromkeys(each.arm.name for each in members):
        marks = []
        for x, gain in _at(members, name):
            low, high = (gain.mean if end is None else end for end in (gain.low, gain.high))
            y, low, high = (max(value, LOWEST) for value in (gain.mean, low, high))
            marks.append(Mark(x + _dodge(name, names), y, low, high, gain.mean < LOWEST))
        made[name] = marks
    return made


def cost_marks(members: Sequence[Gain], names: Sequence[str]) -> dict[str, list[Mark]]:
    """The same for equivalent cost relative to own cost; of those that have one."""
    made: dict[str, list[Mark]] = {}
    for each in sorted(members, key=lambda each: each.arm.rung or ("", 0)):
        found, own, rung = each.score.equivalent, each.arm.cost, each.arm.rung
        if found is None or rung is None:
            continue
        low, high = (found.cost if end is None else end for end in (found.low, found.high))
        x = math.log2(rung[1]) + _dodge(each.arm.name, names)
        mark = Mark(x, found.cost / own, low / own, high / own, bool(found.sign(found.cost)))
        made.setdefault(each.arm.name, []).append(mark)
    return made


def _at(members: Sequence[Gain], name: str) -> list[tuple[float, Any]]:
    """The gains of a method by the logarithm of the passes."""
    rows = [(each.arm.rung, each.score.gain) for each in members if each.arm.name == name]
    return sorted(((math.log2(rung[1]), gain) for rung, gain in rows if rung and gain), key=lambda row: row[0])


def _dodge(name: str, names: Sequence[str]) -> float:
    return _DODGE * min(1.0, 8 / len(names)) * (names.index(name) - (len(names) - 1) / 2)


def _line(axes: Any, marks: Sequence[Mark], look: dict[str, Any]) -> None:
    x, y = [m.x for m in marks], [m.y for m in marks]
    colour = look["color"]
    axes.plot(x, y, color=colour, ls=look["ls"], lw=1.8, alpha=0.9)
    axes.vlines(x, [m.low for m in marks], [m.high for m in marks], color=colour, lw=1.3, alpha=0.75)
    for mark in marks:
        fill = "white" if mark.beyond else colour
        axes.plot([mark.x], [mark.y], marker=look["marker"], ms=5.5, color=colour, mfc=fill, mec=colour, zorder=3)


def _reference(axes: Any, y: float, label: str) -> None:
    """The line that methods have to exceed, with its name above the panel, where no data are."""
    axes.axhline(y, color=LIGHT.text, lw=1.1, zorder=1)
    axes.grid(axis="y", color=LIGHT.faint, lw=0.8)
    axes.margins(x=0.06, y=0.08)
    shown = f"black line: {label}"
    text = axes.annotate(shown, (0, 1), (0, 3), xycoords="axes fraction", textcoords="offset points", fontsize=8.5)
    text.set_in_layout(False)  # or a long one makes its panel narrow


def _passes(axes: Any, members: Sequence[Gain]) -> None:
    # A rung's name is a round number, its length what makes the steps equal: 66 passes on ladder-c64.
    passes = {each.arm.rung[1]: each.arm.recipe.length for each in members if each.arm.rung}
    axes.set_xticks([math.log2(n) for n in passes], [f"{n}" for n in passes.values()])
    axes.set_xlim(math.log2(min(passes)) - 0.5, math.log2(max(passes)) + 0.5)
    axes.set_xlabel("passes over the data, at the same number of steps")
