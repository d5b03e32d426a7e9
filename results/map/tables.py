"""The tables of results/README.md, from the results of the study.

python results/map/tables.py            print them
python results/map/tables.py --write    put them into the page, each below its mark (<!-- ladders -->)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from halfway.lab.comparison.curves import Point, difference_at
from halfway.lab.comparison.paired import Difference, difference, residual
from halfway.lab.files import write_whole
from halfway.lab.study import claims, ledger, plan
from halfway.lab.study.gains import Gain, spread
from halfway.lab.study.results import Study, collect
from halfway.tables import markdown

HERE = Path(__file__).parent
PAGE = HERE.parent / "README.md"

LADDERS = {
    "ladder-c4": "C, 4 passes",
    "ladder-c16": "C, 16",
    "ladder-c64": "C, 66",
    "ladder-f8": "F, 8 passes",
    "ladder-f32": "F, 32",
    "ladder-f128": "F, 130",
}
CAPPED = "last_loss_proportional, capped"
CONTENDERS = {
    "balanced_remembered": "`balanced_remembered`",
    "balanced_proportional": "`balanced_proportional`",
    "last_loss_proportional, bounded": "`last_loss_proportional`, bounded",
    CAPPED: "`last_loss_proportional`, capped",
}
STRESS = {
    "ladder-f8-noisy": "F, 8 passes, a fifth of the labels wrong",
    "ladder-c16-tailed": "C, 16 passes, classes of 3,572 down to 71 images",
    "ladder-c16-copies": "C, 16 passes, every image four times as near-copies",
    "ladder-cifar100": "CIFAR-100, 8 passes",
}
TAIL = {
    "ladder-c16-tailed": "C, 16 passes, classes of 3,572 down to 71 images",
    "ladder-f32-tailed": "F, 32 passes, classes of 4,464 down to 89",
}
TWO = {"ladder-c16": "C, 16 passes", "ladder-f8": "F, 8 passes"}
ELSEWHERE = {
    "ladder-f32": "F, 32",
    "ladder-f128": "F, 130",
    "ladder-f8-noisy": "F, 8, wrong labels",
    "ladder-c64": "C, 66",
    "ladder-cifar100": "CIFAR-100, 8",
}
FLATTER = {**LADDERS, "ladder-f8-noisy": "F, 8, wrong labels", "ladder-cifar100": "CIFAR-100, 8"}
AUTO = {
    "ladder-f8": "F, 8 passes",
    "ladder-f8-noisy": "F, 8, wrong labels",
    "speedrun-cifar10": "all of CIFAR-10, 10 passes",
    "ladder-f32": "F, 32",
    "ladder-f128": "F, 130",
}
MORE_FROM = 8  # of "real scale again": planned when those before had been seen
RATIOS = (0.3, 0.5, 0.7)
RIVALS = {
    "random_subset": "a fixed subset",
    "infobatch_dagger": "InfoBatch†",
    "divbs": "DivBS",
    "random in the window": "random per batch, same window",
}
EQUAL_COST = "*points to the better control at equal cost:*"
SCREEN = {
    "balanced_remembered": "balanced_remembered",
    "balanced_proportional": "balanced_proportional",
    CAPPED: CAPPED,
    "last_loss_proportional, bounded": "last_loss_proportional, bounded",
    "last_loss_proportional": "last_loss_proportional",
    "order_dp": "order_dp",
    "rho_remembered": "rho_remembered",
    "last_loss_hard": "last_loss_hard (n = 2)",
    "early_exit, layer2": "early_exit at layer2 (n = 2)",
    "pfb": "pfb (n = 2)",
    "shorter 0.5": "full data for fewer steps",
}


class Results:
    """Cells of a stage."""

    def __init__(self, study: Study, stage: str) -> None:
        self._study, self._stage = study, stage
        self._found = {(each.arm.base, each.arm.name): each for each in study.gains[stage]}

    def of(self, base: str, arm: str) -> Gain | None:
        return self._found.get((base, arm))

    def score(self, base: str, arm: str = "full") -> str:
        found = self.of(base, arm)
        return "" if found is None else f"{sum(found.arm.scores.values()) / len(found.arm.scores):.2f}"

    def seeds(self, base: str) -> str:
        """How many seeds the arms of a recipe have, beside full data and a second draw: 5, or 3 to 5."""
        arms = [each.arm for (at, _), each in self._found.items() if at == base]
        arms = [arm for arm in arms if arm.role not in ("full", "again")]
        counts = sorted({len(arm.scores) for arm in arms}) or [0]
        return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"

    def gain(self, base: str, arm: str) -> str:
        """Over the better control; bold is what may be called better or worse."""
        found = self.of(base, arm)
        if found is None or found.score.gain is None:
            return ""
        return _bold(found.score.gain, self._study.word(found) != "not told apart")

    def to_control(self, base: str, arm: str, control: str) -> str:
        """To random pruning or fewer steps at the arm's cost."""
        found = self.of(base, arm)
        d = None if found is None else found.score.differences.get(control)  # type: ignore[call-overload]
        return "" if d is None else _bold(d, d.told_apart)

    def to_full(self, base: str, arm: str) -> str:
        """At the arm's own cost, which is lower."""
        mine, full = self.of(base, arm), self.of(base, "full")
        if mine is None or full is None:
            return ""
        here = [member for member in self._study.arms[self._stage] if member.base == base and member.entries]
        d = difference(mine.arm.scores, full.arm.scores, spread(here, "scores"))
        return "" if d is None else _bold(d, d.told_apart)

    @property
    def first_fresh(self) -> int:
        """The first seed that nobody had seen when the stage was planned."""
        return min(self._study.stages[self._stage]["fresh_seeds"])

    def on_seeds(self, base: str, arm: str, other: str, first: int, last: int | None = None) -> str:
        """On some seeds alone, by the differences of two arms alone: the paired t test. In brackets how many."""
        scores = [each.arm.scores if (each := self.of(base, name)) is not None else {} for name in (arm, other)]
        mine, others = ({s: x for s, x in by.items() if s >= first and (last is None or s <= last)} for by in scores)
        d = difference(mine, others, residual({arm: mine, other: others}))
        return "" if d is None else f"{_bold(d, d.told_apart)} ({d.n})"


def _bold(d: Difference, told_apart: bool) -> str:
    return f"**{d}**" if told_apart else str(d)


# ---------------------------------------------------------------------- the tables


def ladders(study: Study) -> str:
    found = Results(study, "confirm")
    fulls = [each.arm for base in LADDERS if (each := found.of(base, "full")) is not None]
    rows = [
        ["n", *(found.seeds(base) for base in LADDERS)],
        ["full data, %", *(found.score(base) for base in LADDERS)],
        ["its training accuracy, %", *(f"{arm.mean('training_score'):.1f}" for arm in fulls)],
        ["random, to full data", *(found.to_full(base, "random 0.5") for base in LADDERS)],
        [EQUAL_COST, *[""] * len(LADDERS)],
        ["full data for fewer steps, to random", *(found.to_control(b, "shorter 0.5", "random") for b in LADDERS)],
        ["random again (A/A)", *(found.to_control(base, "random 0.5 again", "random") for base in LADDERS)],
    ]
    exploratory = {"pfb": "`pfb` (exploratory)", "last_loss_hard": "`last_loss_hard` (exploratory)"}
    for arm, label in {**CONTENDERS, **exploratory}.items():
        rows.append([label, *(found.gain(base, arm) for base in LADDERS)])
    return markdown(["", *LADDERS.values()], rows)


def screen(study: Study) -> str:
    found = Results(study, "screen")
    bases = study.stages["screen"]["recipes"]
    return markdown(
        ["", *bases],
        [[label, *(found.to_control(base, arm, "random") for base in bases)] for arm, label in SCREEN.items()],
    )


def ratios(study: Study) -> str:
    found = Results(study, "ratios")
    rows = [["n", *(found.seeds(base) for base in TWO for _ in (0, 1))]]
    rows.append(["random, to full data", *(found.to_full(base, f"random {k}") for base in TWO for k in (0.7, 0.3))])
    rows.append([EQUAL_COST, *[""] * 4])
    fewer = [found.to_control(base, f"shorter {keep}", "random") for base in TWO for keep in (0.7, 0.3)]
    rows.append(["full data for fewer steps, to random", *fewer])
    for arm, label in CONTENDERS.items():
        rows.append([label, *(found.gain(base, f"{arm}, p = {p}") for base in TWO for p in (0.3, 0.7))])
    return markdown(["", *(f"{heading}, p = {p}" for heading in TWO.values() for p in (0.3, 0.7))], rows)


def stress(study: Study) -> str:
    found = Results(study, "stress")
    rows = [
        ["n", *(found.seeds(base) for base in STRESS)],
        ["full data, %", *(found.score(base) for base in STRESS)],
        ["random, to full data", *(found.to_full(base, "random 0.5") for base in STRESS)],
        [EQUAL_COST, *[""] * len(STRESS)],
    ]
    arms = {
        CAPPED: CONTENDERS[CAPPED],
        "balanced_remembered": "`balanced_remembered`",
        "pfb": "`pfb`",
    }
    rows += [[label, *(found.gain(base, arm) for base in STRESS)] for arm, label in arms.items()]
    return markdown(["", *STRESS.values()], rows)


def tail(study: Study) -> str:
    found = Results(study, "tail")
    fulls = [each.arm for base in TAIL if (each := found.of(base, "full")) is not None]
    scores = [f"{found.score(arm.base)} ({arm.mean('training_score'):.1f})" for arm in fulls]
    rows = [
        ["full data, % (on its training images)", *scores],
        ["random, to full data", *(found.to_full(base, "random 0.5") for base in TAIL)],
        [EQUAL_COST, *[""] * len(TAIL)],
    ]
    arms = {
        "class_balanced, square root": "`class_balanced`, square root of the sizes",
        "last_loss_proportional": "`last_loss_proportional`",
        "class_balanced": "`class_balanced`, all classes alike",
        CAPPED: CONTENDERS[CAPPED],
        "class_balanced, by weights": "random, the losses weighted by class",
    }
    rows += [[label, *(found.gain(base, arm) for base in TAIL)] for arm, label in arms.items()]
    all_data = [found.to_full(base, "all data, by weights") for base in TAIL]
    rows.append(["*all data (127 of 128 samples), weighted by class, to full data*", *all_data])
    return markdown(["", *TAIL.values()], rows)


def stream(study: Study) -> str:
    found, base = Results(study, "stream"), "ladder-stream"
    heading = "One pass over a stream of 40,000 images, where nothing is remembered"
    rows = [[f"n = {found.seeds(base)}; full data, %", found.score(base)]]
    rows.append(["random, to full data at half of the cost", found.to_full(base, "random 0.5")])
    rows.append(["full data for fewer steps, to random", found.to_control(base, "shorter 0.5", "random")])
    rows += [[f"`{arm}`", found.gain(base, arm)] for arm in ("early_exit", "balanced", "pfb")]
    return markdown([heading, ""], rows)


def smoothing(study: Study) -> str:
    planned, elsewhere = Results(study, "smoothing"), Results(study, "smoothing elsewhere")
    columns = {**dict.fromkeys(TWO, planned), **dict.fromkeys(ELSEWHERE, elsewhere)}
    rows = [
        ["n", *(found.seeds(base) for base, found in columns.items())],
        ["full data, %", *(found.score(base) for base, found in columns.items())],
        ["random, to full data", *(found.to_full(base, "random 0.5") for base, found in columns.items())],
        [EQUAL_COST, *[""] * len(columns)],
    ]
    for arm in (CAPPED, "balanced_remembered"):
        rows.append([CONTENDERS[arm], *(found.gain(base, arm) for base, found in columns.items())])
    capped = [found.to_full(base, CAPPED) for base, found in columns.items()]
    rows.append([f"*{CONTENDERS[CAPPED]}, to full data*", *capped])
    return markdown(["Label smoothing of 0.1 (controls too)", *TWO.values(), *ELSEWHERE.values()], rows)


def floor(study: Study) -> str:
    """Where it was chosen."""
    found, bases = Results(study, "floor"), study.stages["floor"]["recipes"]
    rows = [
        [f"capped, floor {size}", *(found.gain(base, f"capped, floor {size}") for base in bases)]
        for size in (0.5, 1, 3)
    ]
    return markdown(["validation images, seeds 110-112 (n = 3)", *bases], rows)


def flatter(study: Study) -> str:
    """The chosen one, on test images."""
    found = Results(study, "flatter")
    rows = [["n", *(found.seeds(base) for base in FLATTER)]]
    rows.append(["capped, floor 0.1", *(found.gain(base, CAPPED) for base in FLATTER)])
    rows.append(["capped, floor 1", *(found.gain(base, "capped, floor 1") for base in FLATTER)])
    return markdown(["test images, seeds 0-4", *FLATTER.values()], rows)


def window(study: Study) -> str:
    found = Results(study, "window")
    rows = [["n", *(found.seeds(base) for base in TWO)]]
    for arm in ("random in the window", "balanced_remembered in the window"):
        label = arm.replace("balanced_remembered", "`balanced_remembered`")
        rows.append([label, *(found.to_control(base, arm, "random") for base in TWO)])
    heading = "The paper's window, as many samples pruned in total (to random without window)"
    return markdown([heading, *TWO.values()], rows)


def real_scale(study: Study) -> str:
    found, base = Results(study, "real scale"), "speedrun-cifar10"
    arms = {
        "full": "full data",
        "random 0.5": "random",
        "shorter 0.5": "full data for fewer steps",
        CAPPED: CONTENDERS[CAPPED],
        "capped, floor 1": "the same, floor 1",
        **{arm: f"`{arm}`" for arm in ("balanced_remembered", "early_exit", "pfb")},
    }
    rows = []
    for arm, label in arms.items():
        if (each := found.of(base, arm)) is not None:
            beside = [found.to_control(base, arm, control) for control in ("random", "shorter")]
            rows.append([label, str(len(each.arm.scores)), f"{each.arm.cost:.3f}", found.score(base, arm), *beside])
    return markdown(["", "n", "cost", "score, %", "to random at equal cost", "to fewer steps at equal cost"], rows)


def real_scale_again(study: Study) -> str:
    """What led, on seeds that are new to it."""
    found, base = Results(study, "real scale again"), "speedrun-cifar10"
    first = found.first_fresh
    blocks = [(first, None), (first, MORE_FROM - 1), (MORE_FROM, None)]
    rows = []
    for arm, label in {CAPPED: CONTENDERS[CAPPED], "auto": "`auto`"}.items():
        for control, words in {"random": "random", "shorter": "fewer steps"}.items():
            beside = [found.on_seeds(base, arm, f"{control} 0.5", *block) for block in blocks]
            rows.append([f"{label} to {words}", *beside, found.to_control(base, arm, control)])
        rows.append([f"{label} to full data", "", "", "", found.to_full(base, arm)])
    fewer = [found.on_seeds(base, "shorter 0.5", "random 0.5", *block) for block in blocks]
    rows.append(["fewer steps to random", *fewer, found.to_control(base, "shorter 0.5", "random")])
    last = MORE_FROM - 1
    return markdown(["", "all new seeds (n)", f"{first} to {last}", f"from {MORE_FROM} on", "all seeds"], rows)


def longer(study: Study) -> str:
    """With twice the passes."""
    found, base = Results(study, "real scale at twice the passes"), "speedrun-cifar10"
    arms = {
        "full": "full data",
        "random 0.5": "random",
        "shorter 0.5": "full data for fewer steps",
        CAPPED: CONTENDERS[CAPPED],
        "auto": "`auto`",
    }
    rows = []
    for arm, label in arms.items():
        if (each := found.of(base, arm)) is not None and each.arm.scores:
            beside = [found.to_control(base, arm, control) for control in ("random", "shorter")]
            to_full = "" if arm == "full" else found.to_full(base, arm)
            rows.append([label, str(len(each.arm.scores)), found.score(base, arm), *beside, to_full])
    return markdown(["20 passes", "n", "score, %", "to random", "to fewer steps", "to full data"], rows)


def auto(study: Study) -> str:
    """The rule, wherever it drew by losses, and in a row of its own where it never did."""
    found = Results(study, "auto")
    rows = []
    for base, label in AUTO.items():
        full, mine = found.of(base, "full"), found.of(base, "auto")
        if full is None or mine is None:
            continue
        beside = [found.to_control(base, "auto", control) for control in ("random", "shorter")]
        rows.append(
            [
                label,
                str(len(mine.arm.scores)),
                found.score(base),
                found.score(base, "random 0.5"),
                found.score(base, "auto"),
                *beside,
                found.to_full(base, "auto"),
            ]
        )
    header = ["", "n", "full data, %", "random, %", "`auto`, %", "to random", "to fewer steps", "to full data"]
    return markdown(header, rows)


def paper(study: Study) -> str:
    """Claims as the study's file words them."""
    judged = claims.judge(study.stages["paper"], study.arms["paper"], "long-cifar10")
    rows = []
    for claim, found, told in judged:
        word = f"**{told}**" if told == "reproduced" else told
        rows.append([claim["says"], claim["arm"], claim["than"], str(claim.get("paper", "")), found, word])
    return markdown(["claim", "arm", "than", "the paper's, CIFAR-10 / 100", "here, points", ""], rows, words=3)


def auto_again(study: Study) -> str:
    """The same rule with more seeds, beside random pruning alone."""
    found = Results(study, "auto again")
    rows = []
    for base in study.stages["auto again"]["recipes"]:
        if (mine := found.of(base, "auto")) is not None:
            beside = found.to_control(base, "auto", "random")
            scores = [found.score(base, arm) for arm in ("random 0.5", "auto")]
            alone = found.on_seeds(base, "auto", "random 0.5", found.first_fresh)
            rows.append([AUTO[base], str(len(mine.arm.scores)), *scores, beside, alone])
    return markdown(["", "n", "random, %", "`auto`, %", "to random", "on new seeds alone (n)"], rows)


def paper_at_equal_cost(study: Study) -> str:
    """PFB beside its rivals of the paper, each a curve over its three ratios that ends in full data."""
    here = {arm.name: arm for arm in study.arms["paper"] if arm.entries}
    pooled, rows = spread(list(here.values()), "scores"), []
    for p in RATIOS:
        mine, cells = here[f"pfb, p = {p}"], []
        for rival in RIVALS:
            arms = [here["full"], *(here[f"{rival}, p = {q}"] for q in RATIOS)]
            d = difference_at(mine.cost, mine.scores, [Point(arm.cost, arm.scores) for arm in arms], pooled)
            cells.append("" if d is None else _bold(d, d.told_apart))
        rows.append([f"p = {p}", f"{mine.cost:.3f}", *cells])
    return markdown(["PFB", "cost", *(f"to {label}" for label in RIVALS.values())], rows)


TABLES = {
    "ladders": ladders,
    "screen": screen,
    "ratios": ratios,
    "stress": stress,
    "tail": tail,
    "stream": stream,
    "smoothing": smoothing,
    "floor": floor,
    "flatter": flatter,
    "window": window,
    "real scale": real_scale,
    "real scale again": real_scale_again,
    "longer": longer,
    "auto": auto,
    "auto again": auto_again,
    "paper": paper,
    "paper at equal cost": paper_at_equal_cost,
}


def tables(study: Study) -> dict[str, str]:
    """By name."""
    return {name: make(study) for name, make in TABLES.items()}


def written(page: str, made: dict[str, str]) -> str:
    """The page with each table below its mark. What stood there, up to a blank line, goes."""
    for name, table in made.items():
        before, mark, after = page.partition(f"<!-- {name} -->\n")
        if not mark:
            raise ValueError(f"{PAGE} has no mark for the table {name!r}: <!-- {name} -->")
        page = before + mark + table + after[after.index("\n\n") :]
    return page


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into results/README.md")
    arguments = parser.parse_args()
    made = tables(collect(plan.read(HERE / "study.yaml"), ledger.read(HERE / "runs.jsonl")))
    if arguments.write:
        write_whole(PAGE, written(PAGE.read_text(), made))
    else:
        print("\n\n".join(f"{name}\n\n{table}" for name, table in made.items()))
