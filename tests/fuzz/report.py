"""Run many random programs and count: `python -m tests.fuzz.report --programs 10000 --processes 2`.

Prints how many steps were replayed and recomputed, for what reasons, and every program that went wrong in a line with
its seed; `--seed 123` runs that one again. `PYTHONPATH=other/checkout/src` has it look at another version of halfway.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait

import torch

import halfway
from tests.fuzz.programs import FAMILIES
from tests.fuzz.training import Outcome, check, prepare


def run(seed: int) -> Outcome:
    """Check one program; an error of the reference is an outcome too."""
    torch.set_num_threads(1)
    try:
        return check(seed)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:200]} ({where.filename}:{where.lineno})"
        return Outcome(seed, verdict="reference", message=words)


class Worker:
    """A process that runs one program after the other. A program that kills it is an outcome, too."""

    def __init__(self) -> None:
        self._start()
        self.seed: int | None = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def give(self, seed: int | None) -> None:
        """A program to run; None: go home."""
        self.seed = seed
        self.connection.send(seed)

    def result(self) -> Outcome:
        try:
            return self.connection.recv()
        except EOFError:
            self._process.join()
            words = f"the process died with exit code {self._process.exitcode}"
            self._start()
            return replace(prepare(self.seed)[-1], verdict="crash", message=words)


def serve(connection: Connection) -> None:
    while (seed := connection.recv()) is not None:
        connection.send(run(seed))


def outcomes(seeds: range, processes: int) -> Iterator[Outcome]:
    """In the order in which they are done."""
    left = iter(seeds)
    workers = [Worker() for _ in range(processes)]
    for worker, seed in zip(workers, left, strict=False):
        worker.give(seed)
    while busy := [w for w in workers if w.seed is not None]:
        ready = wait([w.connection for w in busy])
        for worker in busy:
            if worker.connection in ready:
                yield worker.result()
                worker.give(next(left, None))


def progress(done: Iterable[Outcome], total: int) -> Iterator[Outcome]:
    """A bar on stderr."""
    begun = time.monotonic()
    wrong = 0
    for i, outcome in enumerate(done, 1):
        wrong += outcome.verdict != "right"
        if i % 10 == 0 or i == total:
            bar = "#" * (30 * i // total)
            left = (time.monotonic() - begun) / i * (total - i)
            print(f"\r[{bar:<30}] {i}/{total}, {wrong} not right, {left:.0f} s left ", end="", file=sys.stderr)
        yield outcome
    print(file=sys.stderr)


def without_details(reason: str) -> str:
    """A reason, or an error, without the numbers and layers that make each one different."""
    reason = re.sub(r"step \d+: ", "", reason)
    reason = re.sub(r"in '[\w.]+'", "in ...", reason)
    reason = re.sub(r"gradient of \S+", "gradient of ...", reason)
    return re.sub(r"\d[\d.e+-]*", "#", reason)


def share(part: float, whole: float) -> str:
    return f"{part / max(whole, 1):.1%}"


def tables(done: list[Outcome]) -> str:
    """The counts as text."""
    verdicts = Counter(o.verdict for o in done)
    replayed, recomputed = sum(o.replayed for o in done), sum(o.recomputed for o in done)
    lines = [
        f"{len(done)} programs: {verdicts['right']} right, {verdicts['wrong']} wrong, {verdicts['crash']} crashed"
        + (f", {verdicts['reference']} errors of the reference" if verdicts["reference"] else ""),
        f"{replayed + recomputed} steps: {replayed} replayed ({share(replayed, replayed + recomputed)}), "
        f"{recomputed} recomputed",
    ]
    reasons: Counter[str] = Counter()
    for o in done:
        for reason, count in o.reasons.items():
            reasons[without_details(reason)] += count
    lines += ["", "recomputed because", *(f"{count:8} {reason}" for reason, count in reasons.most_common(40))]
    failed = [o for o in done if o.verdict != "right"]
    if failed:
        messages = Counter(without_details(f"{o.verdict}: {o.message}") for o in failed)
        lines += ["", "what was wrong", *(f"{count:8} {words}" for words, count in messages.most_common(40))]
        lines += ["", "programs that were not right, by the kinds of their steps, ordinary ones left out"]
        lines += by_kind(done)
        alone = [o for o in done if len(special(o.kinds)) <= 1]
        lines += ["", "the same, of programs with only one kind that is not ordinary", *by_kind(alone)]
    return "\n".join(lines)


def special(kinds: set[str]) -> set[str]:
    """The kinds of steps that are not ordinary; "ordinary" if there is none."""
    ordinary = {c.__name__ for c in FAMILIES["ordinary"][1]} | {"Residual"}
    return {k for k in kinds if k.partition("(")[0] not in ordinary} or {"ordinary"}


def by_kind(done: list[Outcome]) -> list[str]:
    seen, bad = Counter[str](), Counter[str]()
    for o in done:
        seen.update(special(o.kinds))
        bad.update(special(o.kinds) if o.verdict != "right" else ())
    worst = sorted(bad, key=lambda k: -bad[k] / seen[k])
    return [f"{bad[k]:8} of {seen[k]:5} ({share(bad[k], seen[k]):>6}) {k}" for k in worst]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.report", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--processes", type=int, default=1, help="at once (default 1)")
    parser.add_argument("--seed", type=int, help="run the program of this seed alone")
    parser.add_argument("--failures", type=int, default=100, help="how many to print one by one (default 100)")
    args = parser.parse_args()
    if args.seed is not None:
        outcome = run(args.seed)
        print(outcome.line())
        print(f"{outcome.replayed} steps replayed, {outcome.recomputed} recomputed {dict(outcome.reasons)}")
        return outcome.verdict != "right"
    print(f"halfway {halfway.__version__}, torch {torch.__version__}")
    seeds = range(args.first, args.first + args.programs)
    done = sorted(progress(outcomes(seeds, args.processes), args.programs), key=lambda o: o.seed)
    print(tables(done))
    failed = [o for o in done if o.verdict != "right"]
    if failed:
        print("", *(o.line() for o in failed[: args.failures]), sep="\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
