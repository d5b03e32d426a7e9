"""What may be said about a comparison. Only this module uses words for better and worse.

- *better*, *worse* than a rival: the 95 % interval of the paired difference leaves out zero.
- *not told apart*: it holds zero, or there is no interval (a single seed, no spread). That says nothing about how near
  the two are: a claim that they do equally well would need a margin stated beforehand and an interval inside it.
- A method as a whole is *better* only if it is better than random pruning without a window *and* than full data for
  fewer steps, each at the method's own cost; *worse* if it is worse than either; else *not told apart*. Random pruning
  in the paper's window is a weak rival: the same cost spread evenly does better. Methods that decide before the epoch
  take fewer steps, and are judged beside `rs2`, which draws at random before the epoch.

The table, the report and the demo print these sentences and no others, so they cannot contradict each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ..recipes.methods import CONTROLS
from .paired import LEVEL, Difference
from .results import Row, rivals
from .trials import Group

Verdict = Literal["better", "worse", "not told apart"]
VERDICTS: tuple[Verdict, ...] = ("better", "worse", "not told apart")
PFB = "pfb"
NAMES = {
    "full": "full data",
    "random": "random pruning",
    "random_even": "random pruning without window",
    "shorter": "full data for fewer steps",
    "rs2": "random pruning per epoch",
    PFB: "PFB",
}
# More rows of one method than this are counted, not listed.
FEW = 6


def verdict(d: Difference) -> Verdict:
    """The word for a difference."""
    if not d.told_apart:
        return "not told apart"
    return "better" if d.mean > 0 else "worse"


def in_family(d: Difference, adjusted_p: float) -> Verdict:
    """The word for one of many differences, given its p value after the correction for their number."""
    return verdict(d) if adjusted_p < LEVEL else "not told apart"


def judged(row: Row) -> Verdict | None:
    """The word for a method as a whole; None unless all of its controls were trained at its cost."""
    needed = rivals(row.group.method)
    if not needed or any(rival not in row.controls for rival in needed):
        return None
    words = [verdict(row.controls[rival].difference) for rival in needed]
    if "worse" in words:
        return "worse"
    return "better" if set(words) == {"better"} else "not told apart"


def against(d: Difference, rival: str) -> str:
    """better than random (+0.31 [+0.10, +0.52] points, 3 seeds)"""
    word = verdict(d)
    return f"{word} {'from' if word == 'not told apart' else 'than'} {rival} ({d} points, {_seeds([d])})"


def name(method: str) -> str:
    """A method's name in a sentence."""
    return NAMES.get(method, method)


def at(group: Group) -> str:
    """ " at p = 0.5, density.noise = 0.1"; empty for full data."""
    ratio = [] if group.ratio is None else [f"p = {group.ratio:g}"]
    parts = [*ratio, *(f"{key} = {value}" for key, value in group.settings)]
    return f" at {', '.join(parts)}" if parts else ""


# -------------------------------------------------------------------- headline


def headline(rows: Sequence[Row]) -> str:
    """The result in one sentence: PFB against its controls; if there are none, against random pruning; if there is
    none, against full data."""
    pfb = [row for row in rows if row.group.method == PFB]
    if found_controls := [row for row in pfb if judged(row) is not None]:
        return _first_up(_of_controls(found_controls))
    for rival, pairs in (
        ("random", [(row.group, row.minus_random) for row in pfb]),
        ("full", [(row.group, row.minus_full) for row in pfb]),
        ("full", [(row.group, row.minus_full) for row in rows]),
    ):
        found = [(group, d) for group, d in pairs if d is not None]
        if found:
            methods = {group.method for group, _ in found}
            mine = name(methods.pop()) if len(methods) == 1 else "pruning"
            return _first_up(_in_one_sentence(mine, name(rival), found))
    row = rows[0]
    return f"{_first_up(name(row.group.method))}{at(row.group)}: {row.mean:.2f} % (n = {len(row.scores)})"


def _of_controls(rows: Sequence[Row]) -> str:
    rival = " and ".join(map(name, rivals(PFB)))
    if len(rows) > 4 or any(row.group.settings for row in rows):
        counts = {word: sum(judged(row) == word for row in rows) for word in VERDICTS}
        return f"PFB against {rival} at the same cost: {_counts(counts)}"
    clauses = []
    for word in VERDICTS:
        found = [row for row in rows if judged(row) == word]
        if not found:
            continue
        # Of the rivals that decide: those that beat it, or those that it does not beat, or all.
        deciding = [
            (key, [row.controls[key].difference for row in found])
            for key in rivals(PFB)
            if any(verdict(row.controls[key].difference) == word for row in found)
        ]
        if word == "not told apart":
            seeds = _seeds([d for _, differences in deciding for d in differences])
            told = f"not told apart from {' and '.join(name(key) for key, _ in deciding)} by {seeds}"
        else:
            told = f"{word} " + " and ".join(f"than {name(key)} by {_points(ds)}" for key, ds in deciding)
        clauses.append(f"at {_ratios([row.group for row in found])} PFB was {told}")
    return "; ".join(clauses) + ", each at the same cost"


def _in_one_sentence(mine: str, rival: str, pairs: Sequence[tuple[Group, Difference]]) -> str:
    if len(pairs) > 4 or any(group.settings for group, _ in pairs):
        return f"{mine} against {rival}: {_counted([d for _, d in pairs])}"
    clauses = []
    for word in VERDICTS:
        found = [(group, d) for group, d in pairs if verdict(d) == word]
        if not found:
            continue
        differences = [d for _, d in found]
        told = f"not told apart from {rival} by {_seeds(differences)}"
        if word != "not told apart":
            told = f"{word} than {rival} by {_points(differences)}"
        clauses.append(f"at {_ratios([group for group, _ in found])} {mine} was {told}")
    return "; ".join(clauses)


def _counted(differences: Sequence[Difference]) -> str:
    """How many of many comparisons went which way."""
    return _counts({word: sum(verdict(d) == word for d in differences) for word in VERDICTS})


def tally(words: Sequence[Verdict]) -> str:
    """of 24 settings better in 3, not told apart in 21"""
    return _counts({word: words.count(word) for word in VERDICTS})


def _counts(counts: Mapping[Verdict, int]) -> str:
    found, total = [word for word in VERDICTS if counts[word]], sum(counts.values())
    if len(found) == 1:
        return f"{found[0]} in all {total} settings"
    return f"of {total} settings " + ", ".join(f"{word} in {counts[word]}" for word in found)


# --------------------------------------------------------------------- reading


def reading(rows: Sequence[Row]) -> list[str]:
    """What the table says, in sentences: about methods beside their controls, about PFB, about the other methods, about
    costs."""
    pfb = [row for row in rows if row.group.method == PFB]
    others = [row for row in rows if row.group.method not in ("full", "random", PFB, *CONTROLS)]
    return [*_about_controls(rows), *_about_pfb(pfb), *_about_others(others), *_about_costs(rows, pfb)]


def _about_controls(rows: Sequence[Row]) -> list[str]:
    """The word for every method that has controls at its cost, and what it rests on."""
    found = [(row, word) for row in rows if (word := judged(row)) is not None]
    if len(found) <= FEW:
        return [f"{row.group.label}: {word}. {_first_up(_beside(row))}." for row, word in found]
    better, worse = ("; ".join(row.group.label for row, w in found if w == word) or "none" for word in VERDICTS[:2])
    return [
        f"Of {len(found)} rows, beside random pruning without window (per epoch for methods that decide before it) and "
        f"full data for fewer steps, both at the same cost: better {better}. Worse {worse}. The others are not told "
        "apart."
    ]


def _beside(row: Row) -> str:
    parts = []
    for key, standing in row.controls.items():
        equal = f", reached at cost {standing.equivalent}" if standing.equivalent else ""
        parts.append(f"{against(standing.difference, name(key))}{equal}")
    return "; ".join(parts)


def _about_pfb(rows: Sequence[Row]) -> list[str]:
    sentences = []
    for rival, differences in (
        ("random pruning at the same ratio", [row.minus_random for row in rows]),
        ("random pruning at the same cost", [row.minus_random_at_cost for row in rows]),
        ("full data", [row.minus_full for row in rows]),
    ):
        found = [(row, d) for row, d in zip(rows, differences, strict=True) if d is not None]
        if len(found) > FEW:
            sentences.append(f"PFB against {rival}: {_counted([d for _, d in found])}.")
        else:
            sentences += [f"{row.group.label}: {against(d, rival)}." for row, d in found]
    return sentences


def _about_others(rows: Sequence[Row]) -> list[str]:
    """Which of the other methods differ from random pruning by their intervals."""
    sentences = []
    for terms, differences in (
        ("at the same ratio", [row.minus_random for row in rows]),
        ("at the same cost", [row.minus_random_at_cost for row in rows]),
    ):
        found = [(row.group.label, verdict(d)) for row, d in zip(rows, differences, strict=True) if d is not None]
        if not found:
            continue
        better, worse = ("; ".join(label for label, v in found if v == word) or "none" for word in VERDICTS[:2])
        sentences.append(
            f"Of {len(found)} other methods, against random pruning {terms}: better {better}. Worse {worse}. The "
            "others are not told apart."
        )
    return sentences


def _about_costs(rows: Sequence[Row], pfb: Sequence[Row]) -> list[str]:
    """The cost of PFB's pruned steps and of random pruning's at the same ratio, for the ratio nearest to one half."""
    by_group = {row.group: row for row in rows}
    pairs = [(row, by_group[rival]) for row in pfb if (rival := row.group.rival("random")) in by_group]
    if not pairs:
        return []
    mine, random = min(pairs, key=lambda pair: abs((pair[0].group.ratio or 0) - 0.5))
    return [
        f"At p = {mine.group.ratio:g} a pruned step cost {mine.flops[0]:.3f} of a full one with PFB and "
        f"{random.flops[0]:.3f} with random pruning, which never looks at what it prunes; the whole run "
        f"{mine.flops[1]:.3f} and {random.flops[1]:.3f} (FLOPs)."
    ]


def _seeds(differences: Sequence[Difference]) -> str:
    fewest, most = min(d.n for d in differences), max(d.n for d in differences)
    if fewest != most:
        return f"{fewest} to {most} seeds"
    return "1 seed" if most == 1 else f"{most} seeds"


def _points(differences: Sequence[Difference]) -> str:
    sizes = sorted((f"{abs(d.mean):.1f}" for d in differences), key=float)
    return f"{sizes[0]} points" if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]} points"


def _ratios(groups: Sequence[Group]) -> str:
    ratios = [f"{ratio:g}" for ratio in sorted({group.ratio for group in groups if group.ratio is not None})]
    if not ratios:
        return "these settings"
    return f"p = {', '.join(ratios[:-1])} and {ratios[-1]}" if len(ratios) > 1 else f"p = {ratios[0]}"


def _first_up(text: str) -> str:
    return text[:1].upper() + text[1:]
