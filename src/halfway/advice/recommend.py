"""What to do, from the regime, the costs and the evidence: one rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..costs.cost import relative_cost
from ..samplers import SAMPLERS
from ..selectors import SELECTORS
from .evidence import Evidence, Finding, Rung

# From this share of small losses on, training saturates: half of the samples teach little.
SATURATES_FROM = 0.5
# A step must be shorter by this much to count: less is within what a measurement varies by.
WORTHWHILE = 0.05
# Of methods that gain nothing one in so many may be recommended all the same.
LEVEL = 0.05
# Training waits for data if it spends more than this share of its time on it.
WAITS_FROM = 0.1
# These need another model, or its losses, which nothing here can see.
_PREPARED = ("rho", "rho_remembered", "proxy")

Kind = Literal["no evidence", "fewer epochs", "random", "method"]


@dataclass(frozen=True)
class Regime:
    """Bounds of the share of plain losses below 0.1 at the end of the planned training."""

    low: float
    high: float

    @property
    def word(self) -> str:
        if self.high < SATURATES_FROM:
            return "underfits"
        return "saturates" if self.low >= SATURATES_FROM else "between: the trial cannot tell"


@dataclass(frozen=True)
class Costs:
    """What a step costs relative to a full one.

    random_time: wall time of a step that prunes at random.
    cut_time: of one that looks at features at the cut; None if there is no cut.
    waiting: the share of a full step's time spent on waiting for data.
    ids: whether samples have ids, positions in a data set: a stream's cannot be left out before they are loaded, and
        methods that remember samples or decide before the epoch cannot know them.
    """

    prune_ratio: float
    random_time: float
    cut_time: float | None = None
    waiting: float = 0.0
    ids: bool = True

    @property
    def waits(self) -> bool:
        """For data, too long."""
        return self.waiting > WAITS_FROM

    @property
    def before_loading(self) -> bool:
        """Whether to decide before samples are loaded: training waits for them, and some can be left out."""
        return self.waits and self.ids

    @property
    def at_the_cut(self) -> float | None:
        """Wall time of a run that looks at features relative to full data; None without a cut."""
        return None if self.cut_time is None else self.waiting + (1 - self.waiting) * self.cut_time

    def time(self, finding: Finding | None) -> float:
        """Wall time of the run relative to full data, with loading; None: random pruning.

        What can be decided before loading is, where training waits for data: only 1 - p of the samples are loaded.
        """
        name = "random" if finding is None else finding.selector
        if (finding is not None and finding.role == "shorter") or name in SAMPLERS:
            return 1 - self.prune_ratio
        needs = SELECTORS[name].needs
        if needs == "nothing":
            loading = self.waiting * (1 - self.prune_ratio if self.before_loading else 1.0)
            return loading + (1 - self.waiting) * self.random_time
        # A selector that looks at the outputs pays the whole forward pass, a third of a step.
        if needs != "features":
            return self.waiting + (1 - self.waiting) * relative_cost(1 / 3, self.prune_ratio)
        return 1.0 if self.at_the_cut is None else self.at_the_cut


@dataclass(frozen=True)
class Recommendation:
    """What to do.

    why: a sentence.
    rungs: those of the map that count here.
    findings: what the recommended arm did there, in their order.
    time: wall time of the run relative to full data.
    """

    kind: Kind
    why: str
    rungs: tuple[Rung, ...] = ()
    findings: tuple[Finding, ...] = ()
    time: float | None = None


def recommend(regime: Regime, costs: Costs, evidence: Evidence, *, classes: bool = True) -> Recommendation:
    """The rule.

    1. *Fewer epochs* if neither random pruning nor the cut makes the run at least 5 % shorter in wall time.
    2. The rungs that count are those of the map whose share of small losses lies within 0.05 of the bounds of the
       regime, or else the nearest one. If there is none with comparisons: *no evidence*.
    3. *A method*, if on every one of these rungs its mean gain over the better control at equal cost is above zero, and
       the p value of that gain times the number of methods that were tried on the rung is below 0.05 (Bonferroni's
       correction: of many methods one looks better by chance). It must also make the run at least 5 % shorter, and have
       what it needs: ids (`costs.ids`) and classes. Of several the one whose smallest gain is the largest.
    4. Otherwise the control with the larger mean score over these rungs, at equal cost: *random* per batch, or full
       data for *fewer epochs*.

    Args:
        classes: whether targets are one class per sample, as in all of the evidence. If not, no method is recommended.
    """
    rungs = tuple(evidence.near(regime.low, regime.high))
    found = [rung.at(costs.prune_ratio) for rung in rungs]
    random, shorter = (next(iter(_on_all(found, role)), []) for role in ("random", "shorter"))
    times = [time for time in (costs.time(None), costs.at_the_cut) if time is not None]
    if min(times) > 1 - WORTHWHILE:
        why = (
            f"a step that prunes {costs.prune_ratio:.0%} of its samples takes {min(times):.2f} of the time of a full "
            "one here, so that only fewer epochs save time"
        )
        return Recommendation("fewer epochs", why, rungs, tuple(shorter), 1 - costs.prune_ratio)
    if not rungs:
        why = "no comparison of methods has been measured yet, so that nothing can be said about accuracy"
        return Recommendation("no evidence", why, time=costs.time(None))
    methods = [each for each in _on_all(found, "method") if classes and _pays(each, rungs, costs)]
    if methods:
        best = max(methods, key=lambda each: min(f.gain.mean for f in each if f.gain is not None))
        why = "it gains over both controls on every rung that counts, corrected for all methods tried there"
        return Recommendation("method", why, rungs, tuple(best), costs.time(best[0]))
    # The gain of random pruning is over fewer epochs.
    gains = [f.gain.mean for f in random if f.gain is not None]
    none = "no method is clearly better than both controls there"
    if shorter and gains and sum(gains) < 0:
        why = f"{none}, and of the two fewer epochs of full data have the higher mean"
        return Recommendation("fewer epochs", why, rungs, tuple(shorter), 1 - costs.prune_ratio)
    why = f"{none}, and of the two random pruning has the higher mean" if gains else none
    return Recommendation("random", why, rungs, tuple(random), costs.time(None))


def _on_all(found: list[list[Finding]], role: str) -> list[list[Finding]]:
    """The arms of a role that every rung has, each with its findings in the order of the rungs."""
    arms: dict[tuple[str, ...], list[Finding]] = {}
    for findings in found:
        for finding in findings:
            if finding.role == role:
                arms.setdefault(finding.same, []).append(finding)
    return [each for each in arms.values() if len(each) == len(found)]


def _pays(findings: list[Finding], rungs: tuple[Rung, ...], costs: Costs) -> bool:
    name = findings[0].selector
    usable = name not in _PREPARED and (costs.ids or (name not in SAMPLERS and SELECTORS[name].wants_ids == "no"))
    clear = all(_clear(finding, rung.tried) for finding, rung in zip(findings, rungs, strict=True))
    return usable and clear and costs.time(findings[0]) <= 1 - WORTHWHILE


def _clear(finding: Finding, tried: int) -> bool:
    """Whether a method's gain on a rung is above zero, corrected for all methods that were tried there."""
    return finding.gain is not None and finding.gain.mean > 0 and finding.p is not None and finding.p * tried < LEVEL
