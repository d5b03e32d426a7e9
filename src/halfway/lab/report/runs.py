"""Which runs a report is about: found in folders, grouped by what they differ in, and put in order."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..comparison import results as recorded
from ..comparison.trials import Group, group_of, matters
from ..comparison.verdict import PFB
from ..recipes import reading
from ..recipes import schema as recipes
from ..recipes.methods import CONTROLS, FULL
from ..recipes.schema import Recipe
from ..training.run_result import RunResult

Groups = dict[Group, dict[int, RunResult]]

# A figure with a line or a row of dots per method has room for this many.
FEW_METHODS = 5

_FIRST = (FULL, "random", "random_even", "shorter", PFB)


@dataclass(frozen=True)
class Runs:
    """What a report is made from.

    groups: the finished runs by group and seed, in the order of the table; empty if only `results.json` is there.
    unfinished: the other runs.
    timing: wall time of steps as `comparison.timing` gives it, with the labels of `groups`.
    written: what `results.json` says, where there are no run folders.
    """

    groups: Groups
    unfinished: list[RunResult]
    timing: dict[str, Any]
    written: recorded.Recorded | None = None

    @cached_property
    def rows(self) -> list[recorded.Row]:
        """The rows of the table."""
        if self.written is None:
            return recorded.summarise(self.groups, self.timing["steps"])
        return sorted(self.written.rows, key=lambda row: _sort_key(row.group))

    @property
    def finished(self) -> list[RunResult]:
        return [run for runs in self.groups.values() for run in runs.values()]

    @property
    def recipe(self) -> Recipe:
        """What all runs share; in the other settings that of any run."""
        if self.written is None:
            return self.finished[0].recipe
        assert self.written.recipe is not None
        return self.written.recipe

    @property
    def session(self) -> dict[str, Any]:
        """Data, versions and machine of one of the runs."""
        return self.finished[0].sessions[-1] if self.written is None else self.written.session

    @property
    def command(self) -> str:
        """The command that wrote `results.json`, if there are no run folders."""
        return "" if self.written is None else self.written.command

    @property
    def methods(self) -> list[str]:
        groups = self.groups if self.written is None else [row.group for row in self.rows]
        return list(dict.fromkeys(group.method for group in groups))

    @cached_property
    def main(self) -> Group | None:
        """The PFB group that the galleries show: at the ratio nearest to one half and, if there are several, with the
        shipped settings; None if there is no PFB run."""
        found = [group for group in self.groups if group.method == PFB]
        shipped = reading.load(name).identity() if (name := self.recipe.name) in reading.names() else {}

        def far(group: Group) -> tuple[float, int]:
            changed = sum(shipped.get(key) != value for key, value in group.settings)
            return round(abs((group.ratio or 0) - 0.5), 6), changed

        return min(found, key=far, default=None)

    @property
    def shown(self) -> Groups:
        """The groups for figures with a line each: all of them, without controls; if there are too many methods, full
        data, random pruning and PFB at its ratio, and as many of the best others at that ratio as there is room for."""
        pruning = {group: seeds for group, seeds in self.groups.items() if group.method not in CONTROLS}
        if len({group.method for group in pruning}) <= FEW_METHODS:  # the points of a control's curve are for the plot
            return pruning if any(group.method != FULL for group in pruning) else self.groups
        ratio = self.main.ratio if self.main is not None else None
        known = [g for g in pruning if g.method in _FIRST and g.ratio in (None, ratio)]
        others = [g for g in pruning if g.method not in _FIRST and ratio in (None, g.ratio)]
        others.sort(key=lambda g: -statistics.fmean(run.score for run in self.groups[g].values()))
        room = max(0, FEW_METHODS + 1 - len(known))
        return {group: seeds for group, seeds in self.groups.items() if group in (*known, *others[:room])}

    @property
    def main_seeds(self) -> list[int]:
        """The seeds of `main`; if random pruning shares any, only those, because sums over more seeds look more
        even."""
        if self.main is None:
            return []
        mine, random = self.groups[self.main], self.groups.get(self.main.rival("random"), {})
        return [seed for seed in mine if seed in random] or list(mine)

    @property
    def example(self) -> RunResult:
        """The first seed of `main`; any run if there is no PFB run."""
        return self.finished[0] if self.main is None else next(iter(self.groups[self.main].values()))

    @property
    def sweep(self) -> str | None:
        """The setting that `--over` swept, if there is exactly one and it is numeric."""
        settings = [setting for row in self.rows for setting in row.group.settings if setting[0] != "length"]
        keys = {key for key, _ in settings}
        if len(keys) != 1:
            return None
        values = {value for _, value in settings}
        return keys.pop() if len(values) > 1 and all(_is_number(v) for v in values) else None


def read(arguments: Sequence[str | Path]) -> Runs:
    """The runs in run folders and in folders of run folders, grouped as `compare` recorded, or by the settings in which
    they differ."""
    if alone := _results_alone(arguments):
        return alone
    paths = find(arguments)
    results = [RunResult.read(path) for path in paths]
    names = sorted({run.recipe.name for run in results})
    if len(names) > 1:
        raise ValueError(f"the runs are of different recipes ({', '.join(names)}); write a report for each")
    if len({run.recipe.root == "synthetic" for run in results}) > 1:
        raise ValueError("some of the runs saw synthetic pictures and others real data; write a report for each")
    finished = [run for run in results if run.finished]
    if not finished:
        todo = "; ".join(f"{run.path.name}: {how_to_go_on(run)}" for run in results[:3])
        raise ValueError(f"none of the {len(results)} run(s) is finished, so there is nothing to report yet. {todo}")
    groups = _as_written_down(arguments, finished) or group_runs(finished)
    return Runs(groups, [run for run in results if not run.finished], _timing(arguments, groups))


def _results_alone(arguments: Sequence[str | Path]) -> Runs | None:
    """A comparison of which only `results.json` is left."""
    folder = Path(arguments[0])
    if len(arguments) > 1 or not folder.is_dir() or _is_run(folder) or any(map(_is_run, folder.iterdir())):
        return None
    written = recorded.read(folder)
    return None if written is None or not written.rows else Runs({}, [], written.timing, written)


def _as_written_down(arguments: Sequence[str | Path], finished: Sequence[RunResult]) -> Groups | None:
    """The groups of a comparison's `results.json`; None if there is none or it does not list all of the runs."""
    if len(arguments) > 1:
        return None
    folder = Path(arguments[0])
    written = recorded.read(folder)
    if written is None:
        return None
    by_path = {run.path.resolve(): run for run in finished}
    groups: Groups = {}
    for group, seeds in written.groups.items():
        for seed, path in seeds.items():
            run = by_path.pop((folder / path).resolve(), None)
            if run is not None:
                groups.setdefault(group, {})[seed] = run
    return None if by_path else _in_order(groups)


def _in_order(groups: Groups) -> Groups:
    return {group: dict(sorted(groups[group].items())) for group in sorted(groups, key=_sort_key)}


def find(arguments: Sequence[str | Path]) -> list[Path]:
    """The run folders, each once."""
    found: dict[Path, Path] = {}
    for argument in map(Path, arguments):
        if not argument.is_dir():
            raise FileNotFoundError(f"{argument} is not a folder; name run folders, or a folder that holds some")
        inside = [argument] if _is_run(argument) else sorted(path for path in argument.iterdir() if _is_run(path))
        if not inside:
            raise FileNotFoundError(
                f"{argument} is neither a run folder (it has no config.yaml) nor does it hold any; "
                "`halfway train` and `halfway compare` make them"
            )
        for path in inside:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def group_runs(results: Sequence[RunResult]) -> Groups:
    """Runs that differ only in their seed, together; the groups in the order of the table.

    A group is a method, its ratio, and every setting that affects the method and is not the same in all runs of such
    methods.
    """
    settings = [
        {key: value for key, value in run.recipe.identity().items() if key not in recipes.OF_A_RUN} for run in results
    ]
    varied = []
    for key in sorted({key for each in settings for key in each}):
        found = {each.get(key) for run, each in zip(results, settings, strict=True) if matters(key, run.method)}
        if len(found) > 1:
            varied.append(key)
    groups: Groups = {}
    for run, values in zip(results, settings, strict=True):
        group = group_of(run.method, run.recipe.mean_ratio, {key: values.get(key) for key in varied})
        seeds = groups.setdefault(group, {})
        if run.recipe.seed in seeds:
            raise ValueError(
                f"{seeds[run.recipe.seed].path} and {run.path} are the same run ({group.label}, seed "
                f"{run.recipe.seed}); leave one of them out"
            )
        seeds[run.recipe.seed] = run
    return _in_order(groups)


def how_to_go_on(run: RunResult) -> str:
    """The command that finishes a run."""
    folder = run.path.name
    command = run.sessions[-1]["command"] if run.sessions else f"halfway train {folder}/config.yaml --out {folder}"
    resumes = command.startswith("halfway compare") or "--resume" in command.split()
    return command if resumes else f"{command} --resume"


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _sort_key(group: Group) -> tuple[Any, ...]:
    """Sorts full data, random, PFB, then the others by name; by ratio; by setting, numbers numerically."""
    method = _FIRST.index(group.method) if group.method in _FIRST else len(_FIRST)
    settings = [(key, (0, value, "") if _is_number(value) else (1, 0, str(value))) for key, value in group.settings]
    return method, group.method, group.ratio or 0.0, settings


def _timing(arguments: Sequence[str | Path], groups: Groups) -> dict[str, Any]:
    """The timing.json files of comparison folders, for the groups at hand."""
    found: dict[str, Any] = {"steps": {}}
    for argument in arguments:
        path = Path(argument) / "timing.json"
        if path.is_file():
            timing = json.loads(path.read_text())
            found = {**timing, **found, "steps": {**timing["steps"], **found["steps"]}}
    by_name = {_plain_numbers(label): step for label, step in found["steps"].items()}
    labels = [group.label for group in groups if _plain_numbers(group.label) in by_name]
    return {**found, "steps": {label: by_name[_plain_numbers(label)] for label in labels}}


def _plain_numbers(label: str) -> str:
    """`lr=1` on the command line is 1.0 in the recipe."""
    return re.sub(r"(\d)\.0\b", r"\1", label)
