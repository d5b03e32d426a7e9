"""A study as a Markdown page: a table for each recipe of each stage, the primary family, what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ... import tables
from ..comparison.paired import Difference
from ..comparison.verdict import tally
from . import claims, predictor
from .arms import Arm
from .gains import CONTROLS, Gain, key
from .holm import detectable, half_width
from .results import Study

COLUMNS = (
    "arm",
    "cost",
    "score",
    "n",
    "to random",
    "to shorter",
    "gain over the better",
    "verdict",
    "could be seen",
    "equivalent cost",
    "gain in test loss",
    "chosen by density",
)
_EXPLORATORY = "exploratory"
FEWEST_RUNGS = 2  # of a ladder, to be judged on
_LISTED = 3  # more arms without a result are counted, not named
# What the columns are.
NOTES = (
    "Cost: FLOPs of a run relative to full data. Score: % on the images named, after the last epoch, mean over n "
    "seeds. Differences are paired by seed, in points, with the 95 % interval from the residual of arm + seed, "
    "pooled over the arms of a recipe and stage. To random, to shorter: random pruning without window, and full "
    "data for fewer steps, each at the arm's own cost (linear in log cost between its runs and full data). Gain: "
    "over that of the two with the larger mean there, r or s; the larger of two means is a little too large by "
    "chance, so gains are rather understated and losses overstated. Could be seen: half the width of the gain's "
    "interval / the true difference that is found with a probability of 0.8. Equivalent cost: the least cost at "
    "which the better control reaches the arm's score, and the ends of the gain's interval; ≤ and ≥ where its curve"
    " ends, none where it scores no more with all data. Test loss: the same with the sign turned, so that more is "
    "better; its better control is its own. Verdicts other than on the primary family are exploratory: one in "
    "twenty comes about by chance."
)


# ---------------------------------------------------------------------- the page


def page(study: Study, wanted: Iterable[str], command: str, picture: str | None) -> str:
    """The page.

    Args:
        wanted: stages.
        command: that prints it.
        picture: the file name of the plot beside the page; None if there is none.
    """
    wanted = list(wanted)
    parts = ["# When does it pay to choose samples?", f"`{command}`"]
    if picture is not None:
        parts.append(f"![Gain over the better control along each ladder]({picture})")
    parts.append(NOTES)
    for name in wanted:
        if study.stages[name].get("primary"):
            header, rows, told = primary(study, name)
            parts += [f"## The primary family ({name})", tables.markdown(header, rows), told]
    for name in wanted:
        parts += _stage(study, name)
    return "\n\n".join([*parts, *_predictor(study, wanted), provenance(study, wanted)]) + "\n"


def _stage(study: Study, name: str) -> list[str]:
    stage, found = study.stages[name], study.gains[name]
    on = " and ".join(sorted({f"{arm.recipe.data.evaluate} images" for arm in study.arms[name]}))
    seeds = ", ".join(map(str, stage["seeds"]))
    seeds += "".join(f"; of {base} {', '.join(map(str, own))}" for base, own in stage.get("fewer_seeds", {}).items())
    about = f"{str(stage['about']).strip()}\n\n" if stage.get("about") else ""
    parts = [f"## {name}", f"{about}Scores on {on}, seeds {seeds}. {missing(study.arms[name])}"]
    for base in stage["recipes"]:
        here = [each for each in found if each.arm.base == base]
        if here:
            parts += [f"### {base}: {here[0].arm.recipe.title}", _full(here)]
            parts.append(tables.markdown(*_filled([cells(study, each) for each in here])))
            parts += _claims(study, name, base)
    return parts


def _claims(study: Study, name: str, base: str) -> list[str]:
    """What the paper says, beside what was measured here."""
    judged = claims.judge(study.stages[name], study.arms[name], base)
    rows = [[c["says"], c["arm"], c["than"], str(c.get("paper", "")), found, told] for c, found, told in judged]
    if not rows:
        return []
    told = "Claims, each with the difference of two arms in points. Reproduced, not reproduced: the interval lies on "
    told += "that side of zero, or of the margin named in the claim. All of this is exploratory."
    return [told, tables.markdown(["claim", "arm", "than", "the paper's", "here", "verdict"], rows, words=4)]


def missing(members: Sequence[Arm]) -> str:
    """Which runs of a stage have no result yet, in a sentence."""
    planned, there = sum(len(arm.seeds) for arm in members), sum(len(arm.entries) for arm in members)
    if planned == there:
        return f"All {planned} runs are there."
    if not there:
        return f"None of its {planned} runs is there yet."
    listed = []
    for base in dict.fromkeys(arm.base for arm in members):
        here = [arm for arm in members if arm.base == base]
        if not any(arm.entries for arm in here):
            listed.append(f"{base}: all")
            continue
        by_seeds: dict[str, list[str]] = {}
        for arm in here:
            if arm.missing:
                by_seeds.setdefault(", ".join(map(str, arm.missing)), []).append(arm.name)
        lacking = [f"{_named(names, len(here))} (seeds {seeds})" for seeds, names in by_seeds.items()]
        if lacking:
            listed.append(f"{base}: {'; '.join(lacking)}")
    return f"{planned - there} of {planned} runs are missing. {'. '.join(listed)}."


def _named(arms: Sequence[str], of: int) -> str:
    """Some of so many arms of a recipe; a long list is only counted."""
    if len(arms) == of:
        return "all arms"
    return " and ".join(arms) if len(arms) <= _LISTED else f"{len(arms)} of {of} arms"


def _full(here: Sequence[Gain]) -> str:
    """What full data reach, and how far the training came."""
    full = next((each.arm for each in here if each.arm.role == "full"), None)
    if full is None:
        return "There are no results of full data."
    parts = [f"Full data: {_score(full)} % (n = {len(full.scores)})"]
    if (training := full.mean("training_score")) is not None:
        parts.append(f"{training:.1f} % on its training images")
    if (small := full.small_losses) is not None:
        parts.append(f"{100 * small:.0f} % of the plain losses below 0.1 in its last round")
    return ", ".join(parts) + "."


def cells(study: Study, each: Gain) -> list[str]:
    """An arm's line, by `COLUMNS`."""
    arm, beside, gain = each.arm, each.score, each.score.gain
    word = study.word(each)
    told = ""
    if arm.role == "method" and word is not None:
        p = study.adjusted.get(key(arm))
        told = word if study.is_primary(arm) else f"{word}, {_EXPLORATORY}"
        told += "" if p is None else f" (Holm p {'< 0.001' if p < 0.001 else f'= {p:.3f}'})"
    shown = gain if arm.role == "method" else None
    in_loss = each.loss.gain if arm.role == "method" else None
    return [
        _label(arm),
        f"{arm.cost:.3f}",
        _score(arm),
        str(len(arm.scores)),
        *(str(beside.differences[control]) if control in beside.differences else "" for control in CONTROLS),
        "" if shown is None else f"{shown} ({str(beside.better)[0]})",
        told,
        "" if shown is None else _could_be_seen(shown),
        "" if shown is None or beside.equivalent is None else str(beside.equivalent),
        "" if in_loss is None else _fine(in_loss),
        "" if (share := arm.mean("chosen_by_density")) is None else f"{100 * share:.0f} %",
    ]


def _label(arm: Arm) -> str:
    if arm.role == "again":
        return f"{arm.name} (A/A: the noise floor)"
    return f"{arm.name} (before the epoch: fewer steps)" if arm.before_epoch else arm.name


def _score(arm: Arm) -> str:
    return f"{sum(arm.scores.values()) / len(arm.scores):.2f}"


def _could_be_seen(d: Difference) -> str:
    half, found = half_width(d), detectable(d)
    return "" if half is None or found is None else f"{half:.2f} / {found:.2f}"


def _fine(d: Difference) -> str:
    """Test losses differ in the third digit."""
    return f"{d.mean:+.3f}" if d.low is None else f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"


def _filled(rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Header and cells, without columns that are empty in all rows."""
    shown = [i for i in range(len(COLUMNS)) if any(row[i] for row in rows)]
    return [COLUMNS[i] for i in shown], [[row[i] for i in shown] for row in rows]


# ------------------------------------------------------- the primary family, the predictor


def primary(study: Study, name: str) -> tuple[list[str], list[list[str]], str]:
    """Of a stage that has one: a table of arms by recipes, gain and word after Holm's correction, and what it says."""
    stage = study.stages[name]
    by_key = {key(each.arm): each for each in study.gains[name]}
    rows, words = [], []
    for arm in stage["primary"]:
        row = [arm]
        for base in stage["recipes"]:
            each = by_key.get((name, base, arm))
            word = None if each is None else study.word(each)
            if each is None or word is None:
                row.append("missing")
                continue
            words.append(word)
            row.append(f"{each.score.gain}, {word}")
        rows.append(row)
    there, short = len(study.adjusted), any(arm.missing for arm in study.arms[name])
    told = f"After Holm's correction over {study.family} comparisons: {tally(words)}." if words else ""
    if there < study.family:
        told += f" {there} of the {study.family} are there; the others count as if they showed nothing."
    told += " Some arms lack seeds: these words may change." if words and short else ""
    return ["gain over the better control", *stage["recipes"]], rows, told.strip()


def _predictor(study: Study, wanted: Sequence[str]) -> list[str]:
    """Of the stages with a ladder of several rungs: a single one says nothing about where gains begin."""
    parts: list[str] = []
    told: list[predictor.Judgement] = []
    for name in wanted:
        by_arm = predictor.rungs(study.gains[name], study.arms[name])
        if max((len(rungs) for ladders in by_arm.values() for rungs in ladders.values()), default=0) < FEWEST_RUNGS:
            continue
        header = ["recipe", "share of losses below 0.1", *by_arm]
        shares = {rung.base: rung.share for ladders in by_arm.values() for rs in ladders.values() for rung in rs}
        rows = []
        for base, at in sorted(shares.items(), key=lambda item: item[1]):
            cells = {arm: str(r.gain) for arm, ls in by_arm.items() for rs in ls.values() for r in rs if r.base == base}
            rows.append([base, f"{at:.3f}", *(cells.get(arm, "") for arm in by_arm)])
        judged = [each for arm, ladders in by_arm.items() for each in predictor.judge(arm, ladders)]
        told += judged
        parts += [f"## Where hard samples begin to pay ({name})", tables.markdown(header, rows)]
        if judged:
            parts += [
                tables.markdown(
                    [
                        "arm",
                        "chosen on",
                        "judged on",
                        "from a share of",
                        "the rule",
                        "always",
                        "best possible",
                        "signs",
                    ],
                    [_judgement(each) for each in judged],
                    words=3,
                )
            ]
    return [*parts, _reading(told)] if parts else []


def _judgement(each: predictor.Judgement) -> list[str]:
    low, high = each.between
    at = "never" if math.isinf(high) else f"{each.threshold:.2f}"
    between = "" if math.isinf(low) or math.isinf(high) else f" (between {low:.2f} and {high:.2f})"
    signs = f"{each.right} of {each.rungs} right, {each.clear} told apart"
    return [
        each.method,
        each.chosen_on,
        each.judged_on,
        f"{at}{between}",
        str(each.rule),
        str(each.always),
        f"{each.best:+.2f}",
        signs,
    ]


def _reading(judged: Sequence[predictor.Judgement]) -> str:
    if not judged:
        return "A threshold needs two ladders, one to choose it on and one to judge it on."
    rungs = max(each.rungs for each in judged)
    return (
        "The rule trains with the arm where the share in the last round of random pruning reaches the threshold, and "
        "with the better control elsewhere (gain 0). The threshold is the one that gains most on the ladder it is "
        "chosen on, and lies in the middle between two shares seen there, never below the lowest. The rule, always, "
        "best possible: mean gain over the rungs of the other ladder, in points, of the rule, of the arm everywhere, "
        "and of a rule that knew the signs. With "
        f"{rungs} rungs a ladder this can show that the predictor fails, or place the threshold within a wide range; "
        "it cannot show that the share is the cause, because passes, training score and share rise together."
    )


def provenance(study: Study, wanted: Sequence[str]) -> str:
    """Where the numbers come from."""
    entries = [entry for name in wanted for arm in study.arms[name] for entry in arm.entries.values()]
    if not entries:
        return "No run is there yet."
    dates = sorted(str(entry["date"]) for entry in entries)
    versions = {", ".join(f"{name} {version}" for name, version in entry["versions"].items()) for entry in entries}
    machines = {f"{e['machine'].get('cpu')}, {e['machine'].get('cores')} cores" for e in entries}
    keys = {entry["key"] for entry in entries}
    return (
        f"{len(keys)} runs of one thread each, {dates[0]} to {dates[-1]}; {'; '.join(sorted(machines))}; "
        f"{'; '.join(sorted(versions))}."
    )
