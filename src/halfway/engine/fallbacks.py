"""Where a replay is not possible: counted with its reason, said once, or an error if replays are demanded."""

from __future__ import annotations

import warnings

from ..errors import ReplayError
from ..stats import Counters
from .plan import Plan

# From this share of the shallow FLOPs on it is said that something is computed because of other samples.
_WORTH_A_WARNING = 0.01

# Expected once in the usual loop (autocast around the model's call, not around the blocker); no warning.
FIRST_AUTOCAST = "the first call of the model showed that it runs under autocast"
NOT_CALLED = "the model was not called on the retained samples"


class Fallbacks:
    """Counts the steps whose shallow layers are computed, and says why.

    Args:
        reuse: "auto", "replay" or "recompute".
        counters: where they are counted.
    """

    def __init__(self, reuse: str, counters: Counters) -> None:
        self._reuse = reuse
        self._counters = counters
        self._said: set[str] = set()
        self._later: list[tuple[str, int]] = []

    def count(self, reason: str, retained: int, *, demanded: bool = True) -> None:
        """The shallow layers of `retained` samples are computed.

        Args:
            demanded: whether this is an error where replays are.
        """
        self._counters.recomputed[reason] += 1
        if reason != NOT_CALLED:
            self._counters.spend_shallow(retained)
        if self._reuse == "recompute" or reason == FIRST_AUTOCAST:
            return
        if self._reuse == "replay" and demanded:
            raise self.error(reason)
        self._say(
            reason,
            f"halfway computes the shallow layers twice instead of replaying them: {reason}. Training is right but "
            "saves less (this is said once; `blocker.stats.recompute_reasons` counts it)",
        )

    def count_later(self, reason: str, retained: int) -> None:
        """From a callback, where nothing may be raised, not even a warning."""
        self._later.append((reason, retained))

    def settle(self) -> None:
        """Count what was left for later."""
        while self._later:
            self.count(*self._later.pop(), demanded=False)

    def forget(self) -> None:
        self._later.clear()

    def partly(self, plan: Plan) -> None:
        """Some operations of a replayed step are computed: worth a word, if they are expensive."""
        share, why = plan.mixed()
        if share > _WORTH_A_WARNING:
            self._say(
                why,
                f"halfway computes {share:.0%} of the shallow layers twice instead of replaying them: they follow "
                f"{why}, and so depend on other samples of the batch. Training is right but saves less "
                "(`blocker.explain()` lists the operations; this is said once)",
                stacklevel=7,  # the user's line
            )

    def known(self, reason: str) -> None:
        """It was said in other words, and need not be said again."""
        self._said.add(reason)

    def error(self, reason: str) -> ReplayError:
        return ReplayError(f'reuse="replay" was demanded, but {reason}; change that or use reuse="auto"')

    def _say(self, what: str, message: str, stacklevel: int = 3) -> None:
        if what not in self._said:
            self._said.add(what)
            warnings.warn(message, stacklevel=stacklevel)
