"""Holm's correction against a table worked out by hand; tests and power against scipy and a plain integral."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("scipy")
pytest.importorskip("numpy")

import numpy as np
from scipy import stats

from halfway.lab.comparison.paired import Difference, Residual, contrast, residual
from halfway.lab.comparison.verdict import in_family
from halfway.lab.study.holm import detectable, half_width, holm, p_value


def test_a_table_worked_out_by_hand() -> None:
    # Sorted: 0.005 x 5, 0.011 x 4, 0.02 x 3, 0.04 x 2, 0.05 x 1, and none below the one before it.
    found = holm({"a": 0.02, "b": 0.005, "c": 0.05, "d": 0.011, "e": 0.04})
    by_hand = {"a": 0.06, "b": 0.025, "c": 0.08, "d": 0.044, "e": 0.08}
    assert found == pytest.approx(by_hand)
    assert list(found) == list(by_hand), "in the order given"


def test_no_value_exceeds_one_and_none_is_given_for_none() -> None:
    assert holm({"a": 0.6, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


def test_missing_comparisons_count_as_if_they_showed_nothing() -> None:
    with_ones = holm({"a": 0.001, "b": 0.01, **{f"missing {i}": 1.0 for i in range(22)}})
    assert holm({"a": 0.001, "b": 0.01}, size=24) == pytest.approx({"a": with_ones["a"], "b": with_ones["b"]})
    with pytest.raises(ValueError, match="family of 1 cannot hold 2"):
        holm({"a": 0.001, "b": 0.01}, size=1)


def test_a_slow_definition_agrees() -> None:
    """Adjusted: the smallest level at which the step-down procedure rejects."""
    values = dict(enumerate(np.random.default_rng(0).uniform(size=9) ** 4))
    order = sorted(values, key=lambda name: values[name])
    found = holm(values)
    for level in np.linspace(0.001, 0.999, 400):
        rejected = set()
        for rank, name in enumerate(order):
            if values[name] > level / (len(order) - rank):
                break
            rejected.add(name)
        assert rejected == {name for name in values if found[name] <= level}


def test_with_two_arms_the_p_value_is_that_of_the_paired_t_test() -> None:
    mine, other = {0: 60.1, 1: 61.0, 2: 59.2, 3: 60.0}, {0: 59.8, 1: 60.1, 2: 59.0, 3: 59.1}
    d = contrast(mine, [(1.0, other)], residual({"mine": mine, "other": other}))
    assert d is not None
    expected = stats.ttest_rel(list(mine.values()), list(other.values())).pvalue
    assert p_value(d) == pytest.approx(expected)


def test_the_interval_leaves_out_zero_exactly_where_p_is_below_five_percent() -> None:
    for mean in np.linspace(-2, 2, 41):
        scores = {seed: float(mean) for seed in range(3)}
        d = contrast(scores, [(1.0, dict.fromkeys(range(3), 0.0))], Residual(0.7, 11))
        assert d is not None
        assert d.low is not None
        assert d.high is not None
        p = p_value(d)
        assert p is not None
        assert (p < 0.05) == (not d.low <= 0 <= d.high)


def reference_power(shift: float, df: int) -> float:
    """The chance that |Z + shift| / s exceeds the t quantile, with s the root of chi-square / df: a plain sum."""
    least = stats.t.ppf(0.975, df)
    s = np.linspace(1e-4, 6, 20_001)
    density = stats.chi2.pdf(df * s**2, df) * 2 * df * s
    beyond = stats.norm.sf(least * s - shift) + stats.norm.cdf(-least * s - shift)
    return float((density * beyond).sum() * (s[1] - s[0]))


@pytest.mark.parametrize("df", [3, 11, 80])
def test_a_difference_of_the_stated_size_is_found_in_four_of_five_studies(df: int) -> None:
    half = float(stats.t.ppf(0.975, df)) * 0.3
    d = Difference(0.1, 0.3, 0.1 - half, 0.1 + half, 4, df)
    found = detectable(d)
    assert found is not None
    assert reference_power(found / 0.3, df) == pytest.approx(0.8, abs=1e-3)
    assert half_width(d) == pytest.approx(half)
    assert found > half, "the half width itself is found in about every second study"


def test_without_an_interval_nothing_is_claimed() -> None:
    alone = Difference(3.0, None, None, None, 1)
    assert p_value(alone) is None
    assert detectable(alone) is None
    assert half_width(alone) is None


def test_words_follow_the_adjusted_p_value() -> None:
    d = Difference(1.0, 0.3, 0.3, 1.7, 4, 11)
    assert in_family(d, 0.049) == "better"
    assert in_family(d, 0.05) == "not told apart"
    assert in_family(Difference(-1.0, 0.3, -1.7, -0.3, 4, 11), 0.01) == "worse"
    assert in_family(Difference(1.0, None, None, None, 1), math.nan) == "not told apart"
