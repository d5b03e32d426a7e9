"""A comparison in numbers: a row per group of runs, in plain text, Markdown and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...tables import columns
from ..training.run_result import RunResult
from .paired import Difference, difference, standard_error
from .trials import Group

COLUMNS = (
    "method",
    "score",
    "n",
    "- full",
    "- random",
    "- random, same cost",
    "pruned, step / run",
    "FLOPs, step / run",
    "wall, step",
)
# Runs whose FLOPs differ by less, relative to full data, cost the same: batches prune whole samples.
SAME_COST = 0.01
Results = Mapping[Group, Mapping[int, RunResult]]


@dataclass(frozen=True)
class Row:
    """A group of runs. Scores and differences are in percent (points), costs relative to full data.

    minus_random: at the same ratio, minus_random_at_cost: at the ratio where it costs the same.
    effective_ratio, flops: (in pruned steps, in the run). wall: median and quartiles of a pruned step, if measured.
    """

    group: Group
    scores: dict[int, float]
    mean: float
    error: float | None
    minus_full: Difference | None
    minus_random: Difference | None
    minus_random_at_cost: Difference | None
    effective_ratio: tuple[float, float]
    flops: tuple[float, float]
    seconds: float
    wall: dict[str, float] | None


def summarise(results: Results, timing: Mapping[str, Any]) -> list[Row]:
    """One row per group that has a finished run."""
    scores = {group: {seed: run.score for seed, run in runs.items()} for group, runs in results.items()}
    flops = {group: _mean_pair([run.flops for run in runs.values()]) for group, runs in results.items()}
    return [_row(group, runs, scores, flops, timing.get(group.label)) for group, runs in results.items()]


def _row(
    group: Group,
    runs: Mapping[int, RunResult],
    scores: dict[Group, dict[int, float]],
    flops: dict[Group, tuple[float, float]],
    wall: Any,
) -> Row:
    mine = scores[group]

    def minus(rival: Group) -> Difference | None:
        return difference(mine, scores[rival]) if rival != group and rival in scores else None

    return Row(
        group=group,
        scores=mine,
        mean=statistics.fmean(mine.values()),
        error=standard_error(list(mine.values())),
        minus_full=minus(group.rival_full),
        minus_random=minus(group.rival("random")) if group.ratio is not None else None,
        minus_random_at_cost=minus(_random_at_cost(group, flops)) if group.ratio is not None else None,
        effective_ratio=_mean_pair([run.effective_ratio for run in runs.values()]),
        flops=flops[group],
        seconds=statistics.fmean(run.seconds for run in runs.values()),
        wall=wall,
    )


def _random_at_cost(group: Group, flops: dict[Group, tuple[float, float]]) -> Group:
    """The random pruning whose run costs most nearly the same; the group itself if none does."""
    settings = group.rival("random").settings

    def far(other: Group) -> float:
        return abs(flops[other][1] - flops[group][1])

    found = [g for g in flops if g.method == "random" and g.settings == settings and far(g) <= SAME_COST]
    return min(found, key=far, default=group)


def cells(row: Row) -> list[str]:
    """A row as text, under `COLUMNS`."""
    wall = row.wall
    return [
        row.group.label,
        f"{row.mean:.2f}" + ("" if row.error is None else f" ± {row.error:.2f}"),
        str(len(row.scores)),
        difference_text(row.minus_full),
        difference_text(row.minus_random),
        difference_text(row.minus_random_at_cost),
        f"{row.effective_ratio[0]:.3f} / {row.effective_ratio[1]:.3f}",
        f"{row.flops[0]:.3f} / {row.flops[1]:.3f}",
        "" if wall is None else f"{wall['median']:.2f} [{wall['q1']:.2f}, {wall['q3']:.2f}]",
    ]


def difference_text(d: Difference | None) -> str:
    """+0.31 [-0.10, +0.72]"""
    if d is None:
        return ""
    return f"{d.mean:+.2f}" if d.low is None else f"{d.mean:+.2f} [{d.low:+.2f}, {d.high:+.2f}]"


def text(rows: Sequence[Row]) -> str:
    """The table for a terminal."""
    return columns(list(COLUMNS), [cells(row) for row in rows])


def markdown(rows: Sequence[Row], command: str, results: Results, timing: Mapping[str, Any]) -> str:
    """A page with the table and all that its numbers must not stand without."""
    run = next(iter(next(iter(results.values())).values()))
    rule = ["---", *("---:" for _ in COLUMNS[1:])]
    table = [f"| {' | '.join(line)} |" for line in (COLUMNS, rule, *map(cells, rows))]
    return "\n".join(
        [
            f"# {run.recipe.name}: {run.recipe.title}",
            "",
            f"`{command}`",
            "",
            *table,
            "",
            *reading(rows),
            "",
            notes(rows, run, timing),
            "",
        ]
    )


def notes(rows: Sequence[Row], run: RunResult, timing: Mapping[str, Any]) -> str:
    """What the columns mean and where the numbers come from."""
    recipe, session = run.recipe, run.sessions[-1]
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
    return (
        f"Score: {recipe.score_name} on the test images, %, after the last {recipe.unit}, mean ± standard error over "
        f"seeds ({', '.join(map(str, seeds))}); differences are paired by seed, with their 95 % t interval. Pruned and "
        f"FLOPs: in the steps that prune / in the whole run. {timed}{session['data']}. {session['date']}, "
        f"{machine['cpu']}, {machine['cores']} cores, {session['threads']} thread(s) per run; {versions}."
    )


def reading(rows: Sequence[Row]) -> list[str]:
    """What the table says about PFB, in sentences; no claim that the intervals do not carry."""
    sentences = []
    for row in rows:
        if row.group.method not in ("pfb", "density"):
            continue
        for rival, d in (("random", row.minus_random), ("full data", row.minus_full)):
            if d is None:
                continue
            points = f"{difference_text(d)} points"
            if not d.clear:
                verdict = f"not told apart from {rival} by {d.n} seed(s)"
            else:
                verdict = f"{'better' if d.mean > 0 else 'worse'} than {rival}"
            sentences.append(f"- {row.group.label}: {verdict} ({points}).")
    return [*sentences, *_against_random(rows)]


def _against_random(rows: Sequence[Row]) -> list[str]:
    """Which of the other methods the intervals tell apart from random pruning."""
    rivals = [row for row in rows if row.group.method not in ("full", "random", "pfb", "density")]
    sentences = []
    for terms, pairs in (
        ("at the same ratio", [(row, row.minus_random) for row in rivals]),
        ("at the same cost", [(row, row.minus_random_at_cost) for row in rivals]),
    ):
        found = [(row, d) for row, d in pairs if d is not None]
        if not found:
            continue
        better = [row.group.label for row, d in found if d.clear and d.mean > 0]
        worse = [row.group.label for row, d in found if d.clear and d.mean < 0]
        sentences.append(
            f"- Of {len(found)} other methods, against random pruning {terms}: better "
            f"{'; '.join(better) or 'none'}. Worse {'; '.join(worse) or 'none'}. The others are not told apart."
        )
    return sentences


def as_json(rows: Sequence[Row], command: str, results: Results, timing: Mapping[str, Any]) -> dict[str, Any]:
    """Every number of the table, and the runs behind it."""
    run = next(iter(next(iter(results.values())).values()))
    recipe = {k: v for k, v in run.recipe.as_dict().items() if k not in ("root", "seed", "method", "prune_ratio")}
    session = {k: v for k, v in run.sessions[-1].items() if k != "command"}
    return {
        "command": command,
        "recipe": recipe,
        **session,
        "timing": dict(timing),
        "rows": [{"label": row.group.label, **asdict(row)} for row in rows],
    }


def _mean_pair(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.fmean(p[0] for p in pairs), statistics.fmean(p[1] for p in pairs)
