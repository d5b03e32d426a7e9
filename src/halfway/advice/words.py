"""Advice as text."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ..tables import columns
from .evidence import Evidence, Finding, Rung
from .recommend import SATURATES_FROM, WAITS_FROM, WORTHWHILE, Costs, Recommendation
from .trial import Trial

if TYPE_CHECKING:
    from .advice import Advice

_WIDTH = 100
_DO = {
    "no evidence": "No evidence on methods. The cheapest thing to try: random pruning per batch.",
    "fewer epochs": "Train for fewer epochs instead.",
    "random": "Prune at random, per batch.",
}


def text(advice: Advice) -> str:
    """The whole advice."""
    found = advice.recommendation
    do = f"Use {found.findings[0].arm}." if found.kind == "method" else _DO[found.kind]
    parts = [
        f"{do} {_sentence(found.why)}",
        _regime(advice),
        _waiting(advice),
        _costs(advice),
        _saved(advice),
        _lost(found),
        *advice.notes,
    ]
    told = "\n\n".join(part if "\n" in part else textwrap.fill(part, _WIDTH) for part in parts if part)
    return f"{told}\n\n{textwrap.indent(advice.lines, '    ')}" if advice.lines else told


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


# ------------------------------------------------------------------------- parts


def _regime(advice: Advice) -> str:
    regime = advice.regime
    rows = [
        _row(f"fewer passes than {advice.epochs:g}", advice.fewer_passes),
        _row("fewer images", advice.fewer_images),
    ]
    header = ["trial", "steps", "passes", "plain loss", "below 0.1", "s/step"]
    planned = (
        f"Regime: {regime.word}. At the end of the planned {advice.epochs:g} epochs, {regime.low:.0%} to "
        f"{regime.high:.0%} of the plain losses should be below 0.1; from {SATURATES_FROM:.0%} on training saturates."
    )
    return f"{textwrap.fill(planned, _WIDTH)}\n\n{columns(header, rows)}"


def _row(name: str, trial: Trial) -> list[str]:
    passes = "n/a" if trial.passes is None else f"{trial.passes:.2g}" if trial.passes < 10 else f"{trial.passes:.0f}"
    return [name, str(trial.steps), passes, f"{trial.loss:.3f}", f"{trial.small:.0%}", f"{trial.seconds_per_step:.4f}"]


def _waiting(advice: Advice) -> str:
    told = f"{advice.costs.waiting:.0%} of the time was spent on waiting for data"
    if not advice.costs.waits:
        return f"{told}: pruning may come after loading."
    if not advice.costs.before_loading:
        return f"{told}, which no pruning saves: the samples of a stream are read in any case."
    return (
        f"{told}, more than {WAITS_FROM:.0%}. A blocker prunes samples that are already loaded; decide before loading, "
        "with halfway.PrunedBatchSampler."
    )


def _costs(advice: Advice) -> str:
    p, costs = advice.costs.prune_ratio, advice.costs
    wall = f"random {costs.random_time:.2f}"
    if costs.cut_time is not None:
        wall += f", at the cut {advice.at} {costs.cut_time:.2f}"
    measured = (
        f"Wall time of a step that prunes {p:.0%}, without loading, relative to a full one, measured here: {wall}."
    )
    if not advice.cuts:
        return f"{measured} The model has no layer to cut at."
    rows = [[cut.name, f"{cut.shallow_share:.3f}", f"{cut.cost(p).step:.3f}"] for cut in advice.cuts]
    table = columns(["cut", "F/T", f"step p={p:g}"], [*rows, ["random", f"{0:.3f}", f"{1 - p:.3f}"]])
    explained = "In FLOPs, with F/T the shallow forward relative to a whole step:"
    return f"{textwrap.fill(measured, _WIDTH)}\n{explained}\n\n{table}"


def _saved(advice: Advice) -> str:
    time = advice.recommendation.time
    if time is None:
        return ""
    told = f"Saved: {1 - time:.0%} of the wall time of the planned training"
    if advice.seconds is not None and advice.saved is not None:
        told += f", {_duration(advice.saved)} of {_duration(advice.seconds)} on this machine"
    # The steps that were timed choose at random, or by density at a cut.
    if advice.recommendation.kind != "method":
        return f"{told}."
    return f"{told}. The time that {advice.recommendation.findings[0].arm} takes to choose was not measured."


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _lost(found: Recommendation) -> str:
    told = [_effect(rung, each) for rung, each in zip(found.rungs, found.findings, strict=False)]
    if not told:
        return "Nothing is known about what is lost in accuracy."
    on = "Likely effect on accuracy, by runs at a reduced scale that ended with about as many small losses"
    return f"{on}: {'; '.join(told)}."


def _effect(rung: Rung, finding: Finding) -> str:
    about = (
        f"{rung.name} ({'' if rung.passes is None else f'{rung.passes:g} passes, '}{rung.small['full']:.0%} below 0.1)"
    )
    to_full = "unknown" if finding.to_full is None else f"{finding.to_full} points to full data"
    gain = "" if finding.gain is None else f", {finding.gain} to {_rival(finding)} at equal cost"
    on = "test" if finding.stage == "confirm" else "validation"
    return f"{about}, {finding.arm} at p = {finding.prune_ratio:g}: {to_full}{gain} (n = {finding.n}, {on} images)"


def _rival(finding: Finding) -> str:
    return {"random": "random pruning", "shorter": "fewer epochs"}.get(finding.better or "", "the better control")


def on_losses(label_smoothing: float, classes: bool) -> list[str]:
    """What moves the share of small losses, beside how well a training fits."""
    smoothed = (
        f"With label smoothing ({label_smoothing:g}) fewer plain losses fall below 0.1: the training may fit its "
        "images better than the regime says."
    )
    unit = "The share of losses below 0.1 depends on the unit of the targets, which are no classes."
    return [note for note, holds in ((smoothed, label_smoothing > 0), (unit, not classes)) if holds]


def warnings(found: Recommendation, evidence: Evidence) -> list[str]:
    """Where the recommended method is clearly worse than its controls."""
    if found.kind != "method":
        return []
    same = found.findings[0].same
    lost = [
        f"{rung.name}: {finding.gain} (n = {finding.n})"
        for rung in evidence.rungs
        for finding in rung.at(found.findings[0].prune_ratio)
        if finding.same == same and finding.gain is not None and finding.gain.below
    ]
    return [f"At a reduced scale it lost against the better control on {'; '.join(lost)}."] if lost else []


def on_auto(found: Recommendation, costs: Costs, classes: bool) -> list[str]:
    """The selector that is random pruning but where losses paid: beside random pruning, and beside fewer epochs where
    it had the higher mean and steps that prune are shorter."""
    measured = [
        (rung, finding, finding.gain)
        for rung in found.rungs
        for finding in rung.at(costs.prune_ratio)
        if finding.selector == "auto" and finding.gain is not None
    ]
    ahead = bool(measured) and all(gain.mean > 0 for _, _, gain in measured)
    fits = found.kind == "random" or (found.kind == "fewer epochs" and ahead and costs.time(None) <= 1 - WORTHWHILE)
    if not (fits and costs.ids and classes):
        return []
    told = [f"{gain} to {_rival(finding)} on {rung.name} (n = {finding.n})" for rung, finding, gain in measured]
    there = f", at equal cost and a reduced scale {'; '.join(told)}" if told else ""
    return [
        'If the loop can pass ids and report losses, selector="auto" is worth a try: random pruning, but where drawing '
        f"by losses has paid{there}."
    ]
