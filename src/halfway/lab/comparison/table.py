"""A comparison as text: the table for a terminal, and a Markdown page with its reading and provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ... import tables
from ..recipes.schema import Recipe
from .results import Row
from .verdict import reading

_CONTROLS = (("vs random, no window", "random_even"), ("vs shorter", "shorter"), ("vs rs2", "rs2"))
COLUMNS = (
    "method",
    "score",
    "n",
    "vs full",
    "vs random",
    "vs random, same cost",
    *(title for title, _ in _CONTROLS),
    "equivalent cost",
    "keep",
    "FLOPs with proxy",
    "pruned, step / run",
    "FLOPs, step / run",
    "wall, step",
)


def cells(row: Row) -> list[str]:
    """A row as text, under `COLUMNS`."""
    wall = row.wall
    return [
        row.group.label,
        f"{row.mean:.2f}" + ("" if row.error is None else f" ± {row.error:.2f}"),
        str(len(row.scores)),
        *("" if d is None else str(d) for d in (row.minus_full, row.minus_random, row.minus_random_at_cost)),
        *(str(row.controls[name].difference) if name in row.controls else "" for _, name in _CONTROLS),
        _equivalent(row),
        *("" if value is None else f"{value:.3f}" for value in (row.keep, row.with_proxy)),
        f"{row.effective_ratio[0]:.3f} / {row.effective_ratio[1]:.3f}",
        f"{row.flops[0]:.3f} / {row.cost:.3f}",
        "" if wall is None else f"{wall['median']:.2f} [{wall['q1']:.2f}, {wall['q3']:.2f}]",
    ]


def _equivalent(row: Row) -> str:
    """Of the control without window: random pruning, per batch or per epoch."""
    return next((s.equivalent for name, s in row.controls.items() if name != "shorter" and s.equivalent), "")


def _filled(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells, without columns about controls and proxies that no row has."""
    every = [cells(row) for row in rows]
    about = {"equivalent cost", "keep", "FLOPs with proxy", *(title for title, _ in _CONTROLS)}
    shown = [i for i, title in enumerate(COLUMNS) if title not in about or any(line[i] for line in every)]
    return [COLUMNS[i] for i in shown], [[line[i] for i in shown] for line in every]


def text(rows: Sequence[Row]) -> str:
    """The table for a terminal."""
    return tables.columns(*_filled(rows))


def markdown(
    rows: Sequence[Row], command: str, recipe: Recipe, session: Mapping[str, Any], timing: Mapping[str, Any]
) -> str:
    """A page with the table, its reading, and where the numbers come from.

    session: of one of the runs, see `RunResult.sessions`.
    """
    return "\n".join(
        [
            f"# {recipe.name}: {recipe.title}",
            "",
            f"`{command}`",
            "",
            tables.markdown(*_filled(rows)),
            "",
            *(f"- {sentence}" for sentence in reading(rows)),
            "",
            notes(rows, recipe, session, timing),
            "",
        ]
    )


def notes(rows: Sequence[Row], recipe: Recipe, session: Mapping[str, Any], timing: Mapping[str, Any]) -> str:
    """What the columns mean and where the numbers come from."""
    machine = session["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in session["versions"].items())
    seeds = sorted({seed for row in rows for seed in row.scores})
    timed = (
        f"Wall: a pruned step relative to a full one on the same batch, median [quartiles] of "
        f"{next(iter(timing['steps'].values()))['rounds']} rounds of all methods in turn, {timing['threads']} "
        "thread(s). "
        if timing["steps"]
        else ""
    )
    df = {d.df for row in rows for d in (row.minus_full, row.minus_random) if d is not None and d.df is not None}
    pooled = f" from the residual of method + seed, pooled over all rows ({max(df)} degrees of freedom)" if df else ""
    curves = (
        "Random without window, shorter and rs2: the control at the row's own cost, interpolated in log cost between "
        "its runs and full data; equivalent cost: where random reaches the row's score, with the 95 % bootstrap "
        "interval over seeds. "
        if any(row.controls for row in rows)
        else ""
    )
    proxies = (
        "FLOPs with proxy: of the run and of all that its method needs before it, which many runs can share. "
        if any(row.with_proxy is not None for row in rows)
        else ""
    )
    return (
        f"Score: {recipe.score_name} on the test images, %, after the last {recipe.unit}, mean ± standard error over "
        f"seeds ({', '.join(map(str, seeds))}); differences are paired by seed, with their 95 % t interval{pooled}. "
        f"{curves}Pruned and FLOPs: in the steps that prune / in the whole run. {proxies}{timed}{session['data']}. "
        f"{session['date']}, {machine['cpu']}, {machine['cores']} cores, {session['threads']} thread(s) per run; "
        f"{versions}."
    )
