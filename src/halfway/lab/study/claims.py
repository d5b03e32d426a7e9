"""What a paper says, beside what was measured: reproduced, not reproduced, or not told apart.

A claim of a stage names two arms:

    claims:
      - {says: better than full data, arm: "pfb, p = 0.3", than: full, paper: "+0.3"}
      - {says: not sensitive to b, arm: "pfb, b = 1", than: "pfb, p = 0.5", within: 1}

It says that the first one scores higher, or, with `within`, that they differ by less than so many points: reproduced if
the whole interval lies within that margin, not reproduced if all of it lies outside. An interval that only holds zero
reproduces nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..comparison.paired import Difference, difference
from .arms import Arm
from .gains import spread

Word = Literal["reproduced", "not reproduced", "not told apart", "missing"]


def judge(stage: Mapping[str, Any], members: Sequence[Arm], base: str) -> list[tuple[dict[str, Any], str, Word]]:
    """Each claim of a stage on a recipe, with the difference as text and the word for it."""
    here = {arm.name: arm for arm in members if arm.base == base and arm.entries}
    pooled = spread(list(here.values()), "scores")
    made: list[tuple[dict[str, Any], str, Word]] = []
    for claim in stage.get("claims", []):
        mine, other = here.get(claim["arm"]), here.get(claim["than"])
        d = None if mine is None or other is None else difference(mine.scores, other.scores, pooled)
        made.append((claim, "", "missing") if d is None else (claim, str(d), word(d, claim.get("within"))))
    return made


def word(d: Difference, within: float | None) -> Word:
    """For the claim that a difference is above zero, or smaller than a margin."""
    if d.low is None or d.high is None:
        return "not told apart"
    if within is None:
        return "reproduced" if d.low > 0 else "not reproduced" if d.high < 0 else "not told apart"
    if -within < d.low and d.high < within:
        return "reproduced"
    return "not reproduced" if d.low > within or d.high < -within else "not told apart"
