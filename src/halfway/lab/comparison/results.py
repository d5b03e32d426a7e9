"""The numbers of a comparison: a row per group of runs, and the file that keeps them.

`results.json` holds, beside the rows, which run folder belongs to which group, so that the report need not guess. It is
written before the first run and again at the end; groups of earlier calls stay in it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..files import write_json
from ..recipes import schema as recipes
from ..recipes.methods import CONTROLS, FULL, METHODS, SHORTER, resolve
from ..recipes.schema import Recipe
from ..training.run_result import RunResult
from .curves import SAME_COST, Point, Standing, standing
from .paired import Difference, Residual, difference, residual, standard_error
from .prepared import Prepared, prepared
from .trials import CURVES, Group, Trial

FILE = "results.json"
# Random pruning per epoch: what methods that decide before the epoch, and take fewer steps, are judged beside.
PER_EPOCH = "rs2"
# Further settings in which runs of a comparison may differ: the draw, and the subset that was drawn.
_OF_A_DRAW = ("selection_seed", "coreset")
Results = Mapping[Group, Mapping[int, RunResult]]


@dataclass(frozen=True)
class Row:
    """A group of runs. Scores and differences are in percent (points), costs relative to full data.

    scores: by seed.
    mean, error: of the scores; no standard error for a single seed.
    minus_full, minus_random: paired differences to full data, and to random pruning at the same ratio.
    minus_random_at_cost: paired difference to random pruning at the ratio where its run costs the same.
    effective_ratio: (in pruned steps, in the run).
    flops: (of a pruned step, of the run), relative to full data for as many epochs.
    cost: FLOPs of the run relative to full data for all epochs of the recipe: less than `flops` where a group takes
        fewer steps.
    seconds: of training, the mean.
    wall: median and quartiles of a pruned step, if measured.
    controls: by control, where the group stands beside it at the same cost.
    keep: the share of the images that a method which decides once retains; None for other methods.
    with_proxy: the cost of a run and of all that its method needs before it; None where that is nothing.
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
    cost: float
    seconds: float
    wall: dict[str, float] | None
    controls: dict[str, Standing] = field(default_factory=dict)
    keep: float | None = None
    with_proxy: float | None = None


@dataclass(frozen=True)
class Recorded:
    """The contents of a `results.json`.

    groups: the run folder of each seed, as planned; empty in files of halfway 0.1.0.
    rows: of the runs that were finished when it was written.
    withdrawn: rows that no longer count, because their runs did not do what their method says.
    command: the command that wrote it.
    recipe: what all runs share; None if nothing was finished.
    session: data, versions and machine of a run.
    timing: see `run.timing`.
    """

    groups: dict[Group, dict[int, Path]]
    rows: list[Row]
    withdrawn: list[Row]
    command: str
    recipe: Recipe | None
    session: dict[str, Any]
    timing: dict[str, Any]


# ---------------------------------------------------------------------- rows


def summarise(results: Results, timing: Mapping[str, Any]) -> list[Row]:
    """One row per group that has a finished run."""
    scores = {group: {seed: run.score for seed, run in runs.items()} for group, runs in results.items()}
    costs = _costs(results)
    pooled = residual(scores, {group: group.rival_full for group in scores})
    before = {each.label: each for each in prepared(results)}
    return [
        _row(group, runs, scores, costs, pooled, timing.get(group.label), before.get(group.label))
        for group, runs in results.items()
    ]


def _row(
    group: Group,
    runs: Mapping[int, RunResult],
    scores: dict[Group, dict[int, float]],
    costs: dict[Group, float],
    pooled: Residual | None,
    wall: Any,
    before: Prepared | None,
) -> Row:
    mine = scores[group]

    def minus(rival: Group) -> Difference | None:
        return difference(mine, scores[rival], pooled) if rival != group and rival in scores else None

    return Row(
        group=group,
        scores=mine,
        mean=statistics.fmean(mine.values()),
        error=standard_error(list(mine.values())),
        minus_full=minus(group.rival_full),
        # At a control's ratio random pruning costs more: it prunes in its window only.
        minus_random=minus(group.rival("random")) if group.method not in (FULL, *CONTROLS) else None,
        minus_random_at_cost=minus(_random_at_cost(group, costs)) if group.ratio is not None else None,
        effective_ratio=_mean_pair([run.effective_ratio for run in runs.values()]),
        flops=_mean_pair([run.flops for run in runs.values()]),
        cost=costs[group],
        seconds=statistics.fmean(run.seconds for run in runs.values()),
        wall=wall,
        controls=_controls(group, scores, costs, pooled),
        keep=None if before is None else before.keep,
        with_proxy=None if before is None else before.together,
    )


def rivals(method: str) -> tuple[str, ...]:
    """The controls that a method must beat: random pruning without window and a shorter training. A method that decides
    before the epoch takes fewer steps than random pruning per batch, so that random pruning per epoch is its rival."""
    if method in (FULL, *CONTROLS):
        return ()
    before_epoch = METHODS[method].before_epoch and method != PER_EPOCH
    return tuple(PER_EPOCH if before_epoch and name != SHORTER else name for name in CURVES)


def _controls(
    group: Group, scores: dict[Group, dict[int, float]], costs: dict[Group, float], pooled: Residual | None
) -> dict[str, Standing]:
    found = {}
    for name in rivals(group.method):
        # Full data are the upper end of every curve, but no control by themselves.
        settings = group.rival(name).settings
        groups = [g for g in scores if g.method == name and g.settings == settings]
        ends = [g for g in scores if g == group.rival_full]
        points = [Point(costs[g], scores[g]) for g in (*groups, *ends)] if groups else []
        if (mine := standing(costs[group], scores[group], points, pooled)) is not None:
            found[name] = mine
    return found


def _costs(results: Results) -> dict[Group, float]:
    """FLOPs of each group's runs, relative to full data for all epochs. The net is the same, so samples count."""

    def mean(key: str) -> dict[Group, float]:
        return {g: statistics.fmean(run.metrics[-1][key] for run in runs.values()) for g, runs in results.items()}

    spent, seen = mean("spent"), mean("seen")
    planned = {g: max(run.full_samples for run in runs.values()) for g, runs in results.items()}

    def reference(group: Group) -> float:
        """Samples that full data for all epochs takes at the group's settings."""
        return max(max(seen[g], planned[g]) for g in seen if _but_length(g) == _but_length(group))

    return {group: spent[group] / reference(group) for group in results}


def _but_length(group: Group) -> Group:
    return Group("", None, tuple((key, value) for key, value in group.rival_full.settings if key != "length"))


def _random_at_cost(group: Group, costs: dict[Group, float]) -> Group:
    """The group of random pruning that is closest in cost; the group itself if none costs the same."""
    settings = group.rival("random").settings

    def far(other: Group) -> float:
        return abs(costs[other] - costs[group])

    found = [g for g in costs if g.method == "random" and g.settings == settings and far(g) <= SAME_COST]
    return min(found, key=far, default=group)


def _mean_pair(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.fmean(p[0] for p in pairs), statistics.fmean(p[1] for p in pairs)


# ---------------------------------------------------------------------- file


def note_plan(folder: Path, trials: Iterable[Trial], command: str) -> None:
    """Add to `results.json` which run folder will belong to which group."""
    groups = {} if (before := read(folder)) is None else before.groups
    for trial in trials:
        groups.setdefault(trial.group, {})[trial.seed] = Path(trial.folder)
    listed = [
        {"label": group.label, **asdict(group), "runs": {str(seed): path.as_posix() for seed, path in runs.items()}}
        for group, runs in groups.items()
    ]
    empty = {"command": command, "timing": {"steps": {}}, "rows": []}
    write_json(folder / FILE, {**(_content(folder) or empty), "groups": listed})


def write(folder: Path, rows: Sequence[Row], command: str, results: Results, timing: Mapping[str, Any]) -> None:
    """Write every number of the table to `results.json`, and leave its groups as they are."""
    run = next(iter(next(iter(results.values())).values()))
    content = {
        "command": command,
        "recipe": {k: v for k, v in run.recipe.as_dict().items() if k not in (*recipes.OF_A_RUN, *_OF_A_DRAW)},
        **{k: v for k, v in run.sessions[-1].items() if k != "command"},
        "timing": dict(timing),
        "rows": [{"label": row.group.label, **asdict(row)} for row in rows],
        "prepared": [asdict(each) for each in prepared(results)],
        "groups": (_content(folder) or {}).get("groups", []),
    }
    write_json(folder / FILE, content)


def _content(folder: Path) -> dict[str, Any] | None:
    path = folder / FILE
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    return found


def read(folder: Path) -> Recorded | None:
    """The contents of `results.json`; None if there is none."""
    content = _content(folder)
    if content is None:
        return None
    own = {"command", "recipe", "timing", "rows", "groups", "withdrawn", "prepared"}
    return Recorded(
        groups={
            _group(entry): {int(seed): Path(run) for seed, run in entry["runs"].items()}
            for entry in content.get("groups", [])
        },
        rows=[_read_row(row) for row in content["rows"]],
        withdrawn=[_read_row(row) for row in content.get("withdrawn", [])],
        command=content["command"],
        recipe=recipes.from_dict(content["recipe"]) if "recipe" in content else None,
        session={key: value for key, value in content.items() if key not in own},
        timing=content["timing"],
    )


def _read_row(row: Mapping[str, Any]) -> Row:
    def minus(key: str) -> Difference | None:
        return None if row.get(key) is None else Difference(**row[key])

    return Row(
        group=_group(row["group"]),
        scores={int(seed): score for seed, score in row["scores"].items()},
        mean=row["mean"],
        error=row["error"],
        minus_full=minus("minus_full"),
        minus_random=minus("minus_random"),
        minus_random_at_cost=minus("minus_random_at_cost"),
        effective_ratio=(row["effective_ratio"][0], row["effective_ratio"][1]),
        flops=(row["flops"][0], row["flops"][1]),
        cost=row.get("cost", row["flops"][1]),  # 0.1.0 had no groups of fewer epochs
        seconds=row["seconds"],
        wall=row["wall"],
        controls={name: _read_standing(entry) for name, entry in row.get("controls", {}).items()},
        keep=row.get("keep"),
        with_proxy=row.get("with_proxy"),
    )


def _read_standing(entry: Mapping[str, Any]) -> Standing:
    ranges = {key: None if value is None else tuple(value) for key, value in entry.items() if key != "difference"}
    return Standing(Difference(**entry["difference"]), **ranges)


def _group(entry: Mapping[str, Any]) -> Group:
    settings = tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in entry["settings"])
    return Group(resolve(entry["method"]), entry["ratio"], settings)
