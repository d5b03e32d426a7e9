"""`halfway study`: a whole study from one file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import add_command

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
      primary: [pfb deep]

--table trains nothing. It prints what the results so far say and writes it to map.md and map.svg beside them: every arm
beside random pruning without window and full data for fewer steps, each at the arm's own cost. For that a stage needs
the arm `full` and both controls at two costs or more, or at the costs of its arms; a run that another stage has made is
not repeated. Holm's correction is made over the arms that stages name as `primary`, on all of their recipes; all else
is exploratory. `claims` of a stage, what a paper says about two of its arms, get a table of their own. With --stages
the page is printed and not written. --evidence FILE also writes the extract that `halfway advise` goes by.
"""
_EPILOG = """\
examples:
  halfway study results/map/study.yaml --list
  halfway study results/map/study.yaml --stages rates,screen --data data --results results/map/runs.jsonl
  halfway study results/map/study.yaml --stages confirm --workers 8
  halfway study results/map/study.yaml --stages stress --recipes ladder-f8-noisy --seeds 2,3     a part of it first
  halfway study results/map/study.yaml --table
  halfway study results/map/study.yaml --table --evidence src/halfway/advice/evidence.json
"""


def register(commands: Any) -> None:
    """Add `study` to the command line."""
    parser = add_command(commands, "study", "many arms over recipes and seeds, from one file", _DESCRIPTION, _EPILOG)
    parser.add_argument("file", metavar="FILE", help="the study, a YAML file")
    parser.add_argument("--stages", metavar="S,...", help="(default: all)")
    parser.add_argument("--recipes", metavar="R,...", help="train only on these (default: all of the stages)")
    parser.add_argument("--seeds", metavar="N,...", help="train only these (default: all of the stages)")
    parser.add_argument("--data", default="data", metavar="DIR", help="where the data are (default: %(default)s)")
    parser.add_argument("--results", metavar="FILE", help="(default: runs.jsonl beside the study)")
    parser.add_argument("--out", default="runs/study", metavar="DIR", help="of unfinished runs (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="train nothing, say what is done and what is left")
    parser.add_argument("--table", action="store_true", help="train nothing, write tables and a plot of the results")
    parser.add_argument("--evidence", metavar="FILE", help="with --table: also write what `halfway advise` goes by")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan, check, train."""
    from ...errors import did_you_mean
    from ..study import plan
    from ..study.run import carry_out, todo
    from ..training import session
    from ..training.trainable import check_trainable

    if arguments.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {arguments.workers}")
    path = Path(arguments.file)
    stages = plan.read(path)
    wanted = list(stages) if arguments.stages is None else arguments.stages.split(",")
    results = Path(arguments.results) if arguments.results else path.with_name("runs.jsonl")
    for name in wanted:
        if name not in stages:
            raise ValueError(f"no stage {name!r}; {did_you_mean(name, stages)}")
    if arguments.evidence is not None and (not arguments.table or arguments.stages):
        raise ValueError("--evidence is written with the tables of all stages: add --table, leave out --stages")
    if arguments.table and (arguments.recipes or arguments.seeds):
        raise ValueError("--recipes and --seeds are for training: tables are of all that is there; leave them out")
    recipes, seeds = _only(arguments, [stages[name] for name in wanted])
    if arguments.table:
        return _table(stages, wanted, results, session.command_line(), arguments.evidence)
    left = []
    for name in wanted:
        runs = plan.runs(name, stages[name], arguments.data)
        runs = [run for run in runs if run.base in recipes and run.seed in seeds]
        missing = todo(runs, results)
        print(f"stage {name}: {len({run.key for run in runs})} runs, {len(missing)} to do", flush=True)
        left += missing
    left = list({run.key: run for run in left}.values())
    if arguments.list or not left:
        return 0
    for each in {(run.base, run.arm): run for run in left}.values():  # before anything is trained
        check_trainable(each.recipe)
    failed = carry_out(left, Path(arguments.out), results, arguments.workers, session.command_line())
    print(f"{len(left) - failed} runs are in {results}" + (f"; {failed} failed" if failed else ""))
    return 1 if failed else 0


def _only(arguments: argparse.Namespace, stages: list[dict[str, Any]]) -> tuple[set[Any], set[Any]]:
    """The recipes and seeds to train: those that are named, else all. A name that no stage has is an error."""
    from ...errors import did_you_mean

    found = []
    for option in ("recipes", "seeds"):
        known = {str(each): each for stage in stages for each in stage[option]}
        given = getattr(arguments, option)
        words = list(known) if given is None else [word.strip() for word in given.split(",")]
        for word in words:
            if word not in known:
                raise ValueError(f"--{option}: no stage has {word!r}; {did_you_mean(word, known)}")
        found.append({known[word] for word in words})
    return found[0], found[1]


def _table(
    stages: dict[str, dict[str, Any]], wanted: list[str], results: Path, command: str, extract: str | None
) -> int:
    """Print the tables, and write them and the plot beside the results."""
    from ..files import write_whole
    from ..study import evidence, ledger, picture, tables
    from ..study.results import collect

    entries = ledger.read(results)
    if not entries:
        raise ValueError(f"there are no results in {results}; without --table the runs are trained")
    study = collect(stages, entries)
    shown = picture.stage_of(study, wanted)
    image = results.with_name("map.svg")
    page = tables.page(study, wanted, command, image.name if shown is not None else None)
    print(page)
    if len(wanted) < len(stages):  # a page of some stages would replace that of all
        return 0
    write_whole(results.with_name("map.md"), page)
    print(f"written to {results.with_name('map.md')}")
    if extract is not None:
        evidence.write(study, len(entries), Path(extract))
        print(f"the evidence for `halfway advise` is in {extract}")
    if shown is None:
        print("no plot yet: it needs methods on rungs of a ladder, with both controls at their costs")
    else:
        picture.draw(study, shown, [image, image.with_suffix(".png")])
        print(f"the plot of stage {shown} is in {image} and {image.with_suffix('.png')}")
    return 0
