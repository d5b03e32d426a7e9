"""Many claims at once: Holm's correction, and what difference a comparison could have seen.

Of m comparisons without any true difference, one in twenty is "significant" by chance. Holm's step-down procedure holds
the chance of a single false claim among all m below 5 %: the smallest p value is multiplied by m, the next by m - 1,
and so on; none may fall below the one before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from ..comparison.paired import LEVEL, Difference

POWER = 0.8

K = TypeVar("K", bound=Hashable)


def holm(p_values: Mapping[K, float], size: int | None = None) -> dict[K, float]:
    """Adjusted p values.

    Args:
        size: of the family, as planned; comparisons that are still missing count as if they showed nothing. Default:
            as many as there are.
    """
    total = len(p_values) if size is None else size
    if total < len(p_values):
        raise ValueError(f"a family of {total} cannot hold {len(p_values)} comparisons")
    adjusted: dict[K, float] = {}
    before = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        before = max(before, min(1.0, (total - rank) * p_values[name]))
        adjusted[name] = before
    return {name: adjusted[name] for name in p_values}


def p_value(d: Difference) -> float | None:
    """Of a two-sided t test, with the degrees of freedom of the pooled residual; None without an interval."""
    from scipy.stats import t

    if not d.error or d.df is None:
        return None
    return float(2 * t.sf(abs(d.mean) / d.error, d.df))


def half_width(d: Difference) -> float | None:
    """Of the 95 % interval: a smaller difference is not told apart from none."""
    return None if d.low is None or d.high is None else (d.high - d.low) / 2


def detectable(d: Difference, power: float = POWER, level: float = LEVEL) -> float | None:
    """The true difference that the two-sided test finds with that probability; None without an interval."""
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    if not d.error or d.df is None:
        return None
    df, least = d.df, float(t.ppf(1 - level / 2, d.df))

    def lacking(shift: float) -> float:
        return float(nct.sf(least, df, shift) + nct.cdf(-least, df, shift)) - power

    most = least + 1.0
    while lacking(most) < 0:
        most *= 1.5
    return float(brentq(lacking, 1e-6, most)) * d.error
