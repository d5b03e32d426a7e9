"""What a report says in words. No claim is made that the 95 % intervals do not carry."""

from __future__ import annotations

from collections.abc import Sequence

from ..comparison.paired import Difference
from ..comparison.table import Row, difference_text
from ..comparison.trials import Group
from ..recipes.schema import Recipe
from .runs import PFB

# Points. An interval that holds zero and is wider than this does not say that two methods do equally well.
TOO_WIDE = 6.0
NAMES = {"full": "full data", "random": "random pruning", "pfb": "PFB", "density": "PFB"}


def name(method: str) -> str:
    """A method in a sentence."""
    return NAMES.get(method, method)


def headline(rows: Sequence[Row]) -> str:
    """The result in one sentence: PFB against random pruning; against full data, if there is no random pruning."""
    pfb = [row for row in rows if row.group.method in PFB]
    for rival, pairs in (
        ("random pruning", [(row.group, row.minus_random) for row in pfb]),
        ("full data", [(row.group, row.minus_full) for row in pfb]),
        ("full data", [(row.group, row.minus_full) for row in rows]),
    ):
        found = [(group, d) for group, d in pairs if d is not None]
        if found:
            methods = {group.method for group, _ in found}
            mine = name(methods.pop()) if len(methods) == 1 else "pruning"
            return _verdicts(mine, rival, found)
    row = rows[0]
    return f"{_first_up(name(row.group.method))}{at(row.group)}: {row.mean:.2f} % (n = {len(row.scores)})"


def _verdicts(mine: str, rival: str, pairs: Sequence[tuple[Group, Difference]]) -> str:
    by_verdict: dict[str, list[tuple[Group, Difference]]] = {}
    for group, d in pairs:
        by_verdict.setdefault(_verdict(d), []).append((group, d))
    if len(pairs) > 4 or any(group.settings for group, _ in pairs):
        return _count(mine, rival, {verdict: len(found) for verdict, found in by_verdict.items()}, len(pairs))
    clauses = []
    for verdict, found in by_verdict.items():
        by = _points([d for _, d in found])
        words = {
            "better": f"{mine} beat {rival} by {by}",
            "worse": f"{rival} beat {mine} by {by}",
            "noise": f"{rival} did as well as {mine}, within noise",
            "open": f"{mine} and {rival} could not be told apart by {_seeds([d for _, d in found])}",
            "one seed": f"{mine} ended {_apart([d for _, d in found])} {rival}, on one seed",
        }[verdict]
        clauses.append(f"at {_ratios([group for group, _ in found])} {words}")
    return _first_up("; ".join(clauses))


def _count(mine: str, rival: str, counts: dict[str, int], total: int) -> str:
    """Of many comparisons, how many went which way."""
    if set(counts) == {"one seed"}:
        return f"{_first_up(mine)} against {rival} in {total} settings, on one seed: too little to tell them apart"
    words = {
        "better": "better",
        "worse": "worse",
        "noise": "within noise",
        "open": "not told apart",
        "one seed": "one seed only",
    }
    if len(counts) == 1:
        return f"{_first_up(mine)} against {rival}: {words[next(iter(counts))]} in all {total} settings"
    parts = [f"{words[v]} in {counts[v]}" for v in words if v in counts]
    return f"{_first_up(mine)} against {rival} in {total} settings: {', '.join(parts)}"


def reading(rows: Sequence[Row], main: Group | None) -> list[str]:
    """Two to four plain sentences with the numbers behind the headline."""
    by_group = {row.group: row for row in rows}
    sentences = []
    if main is not None:
        sentences.append(_against_random(by_group[main]))
        sentences.append(_others(rows, main))
        sentences.append(_cost(by_group[main], by_group.get(main.rival("random"))))
    sentences.append(_against_full(rows, main))
    return [sentence for sentence in sentences if sentence]


def _against_random(row: Row) -> str:
    d = row.minus_random
    if d is None:
        return ""
    numbers = f"{difference_text(d)} points"
    where = f"PFB{at(row.group)} against random pruning"
    if d.low is None:
        return f"{where}: {numbers}; a single seed cannot tell whether that is more than noise."
    interval = "paired by seed, with the 95 % interval"
    if not d.clear:
        told = "random did as well" if _verdict(d) == "noise" else "either may be better; more seeds would tell"
        return f"{where}: {numbers} ({interval}): as far as {d.n} seeds can tell, {told}."
    return f"{where}: {numbers} ({interval}): {'better' if d.mean > 0 else 'worse'}, beyond the noise of {d.n} seeds."


def _others(rows: Sequence[Row], main: Group) -> str:
    """The other ratios of PFB, if they are few enough to read."""
    others = [r for r in rows if r.group.method in PFB and r.group != main and r.minus_random is not None]
    if not 0 < len(others) <= 4:
        return ""
    parts = []
    for row in others:
        alone = " (one seed)" if row.minus_random is not None and row.minus_random.low is None else ""
        parts.append(f"{at(row.group)}: {difference_text(row.minus_random)}{alone}")
    return f"The same{';'.join(parts)}."


def _cost(pfb: Row, random: Row | None) -> str:
    if random is None:
        step, run = pfb.flops
        return f"A pruned step of PFB cost {step:.3f} of the FLOPs of a full one, the whole run {run:.3f}."
    text = (
        f"In FLOPs a pruned step cost {pfb.flops[0]:.3f} of a full one with PFB and {random.flops[0]:.3f} with random, "
        f"which never looks at what it prunes; the whole run {pfb.flops[1]:.3f} and {random.flops[1]:.3f}."
    )
    if pfb.minus_random is not None and _verdict(pfb.minus_random) in ("noise", "worse"):
        text += " So the probe bought nothing that shows here."
    return text


def _against_full(rows: Sequence[Row], main: Group | None) -> str:
    chosen = [r for r in rows if r.minus_full is not None]
    if main is not None:
        chosen = [r for r in chosen if r.group == main or r.group == main.rival("random")]
    parts = []
    for row in chosen[:3]:
        d = row.minus_full
        assert d is not None
        judgement = {"noise": "within noise", "open": "within noise", "one seed": "one seed"}.get(
            _verdict(d), "more than noise"
        )
        parts.append(f"{name(row.group.method)} ended {_apart([d])} it ({judgement})")
    full = next((row for row in rows if row.group.method == "full"), None)
    if not parts or full is None:
        return ""
    return f"Full data ended at {full.mean:.2f} % (n = {len(full.scores)}); {' and '.join(parts)}."


def scale(recipe: Recipe, data: str) -> str:
    """What was trained, on which data, and whether that is a setting of the paper."""
    size = ["reduced scale"] if recipe.name.startswith("tiny-") else []
    return " · ".join([_first_up(recipe.title), data, *size])


def _verdict(d: Difference) -> str:
    if d.low is None or d.high is None:
        return "one seed"
    if d.clear:
        return "better" if d.mean > 0 else "worse"
    return "noise" if d.high - d.low <= TOO_WIDE else "open"


def _seeds(differences: Sequence[Difference]) -> str:
    fewest, most = min(d.n for d in differences), max(d.n for d in differences)
    return f"{fewest} seeds" if fewest == most else f"{fewest} to {most} seeds"


def _points(differences: Sequence[Difference]) -> str:
    sizes = sorted((f"{abs(d.mean):.1f}" for d in differences), key=float)
    return f"{sizes[0]} points" if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]} points"


def _apart(differences: Sequence[Difference]) -> str:
    means = [d.mean for d in differences]
    if len(means) == 1 or min(means) * max(means) > 0:
        if means[0] == 0:
            return "level with"
        return f"{_points(differences)} {'above' if means[0] > 0 else 'below'}"
    return f"{min(means):+.1f} to {max(means):+.1f} points from"


def at(group: Group) -> str:
    """ " at p = 0.5, density.noise = 0.1"; empty for full data."""
    ratio = [] if group.ratio is None else [f"p = {group.ratio:g}"]
    parts = [*ratio, *(f"{key} = {value}" for key, value in group.settings)]
    return f" at {', '.join(parts)}" if parts else ""


def _ratios(groups: Sequence[Group]) -> str:
    ratios = [f"{ratio:g}" for ratio in sorted({group.ratio for group in groups if group.ratio is not None})]
    if not ratios:
        return "these settings"
    return f"p = {', '.join(ratios[:-1])} and {ratios[-1]}" if len(ratios) > 1 else f"p = {ratios[0]}"


def _first_up(text: str) -> str:
    return text[:1].upper() + text[1:]
