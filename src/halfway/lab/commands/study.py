"""`halfway study`: a whole study from one file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_DESCRIPTION = """\
Train the runs of a study: stages of arms, recipes and seeds, described in one YAML file. Runs that are in the file of
results already are skipped, so that the same command goes on after an interruption. Each process has one thread, which
on a CPU is the fastest way to train many small networks.

A stage of a study:

  stages:
    screen:
      recipes: [ladder-c16, ladder-f8]
      seeds: [110, 111, 112]
      settings: {data.evaluate: validation}
      arms:
        full: {}
        random: {method: random, prune_ratio: 0.5}
        pfb deep: {method: pfb, prune_ratio: 0.5, cut: layer2}
        random, twice the rate: {method: random, prune_ratio: 0.5, times: {optimizer.lr: 2}}
"""
_EPILOG = """\
examples:
  halfway study results/map/study.yaml --list
  halfway study results/map/study.yaml --stages rates,screen --data data --results results/map/runs.jsonl
  halfway study results/map/study.yaml --stages confirm --workers 8
"""


def register(commands: Any) -> None:
    """Add `study` to the command line."""
    parser = commands.add_parser(
        "study",
        help="many arms over recipes and seeds, from one file",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="the study, a YAML file")
    parser.add_argument("--stages", metavar="S,...", help="(default: all)")
    parser.add_argument("--data", default="data", metavar="DIR", help="where the data are (default: %(default)s)")
    parser.add_argument("--results", metavar="FILE", help="(default: runs.jsonl beside the study)")
    parser.add_argument("--out", default="runs/study", metavar="DIR", help="of unfinished runs (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="train nothing, say what is done and what is left")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan, check, train."""
    from ...errors import did_you_mean
    from ..study import plan
    from ..study.run import carry_out, todo
    from ..training import loop, session

    if arguments.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {arguments.workers}")
    path = Path(arguments.file)
    stages = plan.read(path)
    wanted = list(stages) if arguments.stages is None else arguments.stages.split(",")
    results = Path(arguments.results) if arguments.results else path.with_name("runs.jsonl")
    left = []
    for name in wanted:
        if name not in stages:
            raise ValueError(f"no stage {name!r}; {did_you_mean(name, stages)}")
        runs = plan.runs(name, stages[name], arguments.data)
        for each in {(run.base, run.arm): run for run in runs}.values():
            loop.check(each.recipe)
        missing = todo(runs, results)
        print(f"stage {name}: {len({run.key for run in runs})} runs, {len(missing)} to do", flush=True)
        left += missing
    left = list({run.key: run for run in left}.values())
    if arguments.list or not left:
        return 0
    failed = carry_out(left, Path(arguments.out), results, arguments.workers, session.command_line())
    print(f"{len(left) - failed} runs are in {results}" + (f"; {failed} failed" if failed else ""))
    return 1 if failed else 0
