"""Paired differences: two methods as in scipy's paired t test, several by the textbook's two-way layout."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("scipy")

import numpy as np
from scipy import stats

from halfway.lab.comparison.paired import Difference, Residual, Scores, contrast, difference, residual, standard_error
from halfway.lab.comparison.verdict import verdict


def seeds(values: list[float]) -> dict[int, float]:
    return dict(enumerate(values))


def of_two(mine: Scores, others: Scores) -> Difference | None:
    return difference(mine, others, residual({"mine": mine, "others": others}))


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_two_methods_are_compared_by_scipy_s_paired_t_test(n: int) -> None:
    random = np.random.default_rng(n)
    for _ in range(20):
        others = random.normal(90, 3, n)
        mine = others + random.normal(0.5, 1, n)
        d = of_two(seeds(mine.tolist()), seeds(others.tolist()))
        test = stats.ttest_rel(mine, others)
        interval = test.confidence_interval(0.95)
        assert d is not None
        assert (d.n, d.df) == (n, n - 1)
        assert d.mean == pytest.approx(float((mine - others).mean()))
        assert d.error == pytest.approx(float(stats.sem(mine - others)))
        assert (d.low, d.high) == pytest.approx((interval.low, interval.high))
        assert (verdict(d) != "not told apart") == (test.pvalue < 0.05), "an interval without zero is a p below 5 %"


def test_the_residual_is_what_is_left_after_a_mean_per_method_and_seed() -> None:
    # Methods +0, +3, +6 and seeds +0, +1, +2, and the pattern [[1, -1, 0], [-1, 1, 0], [0, 0, 0]] on top, whose rows
    # and columns sum to zero: four squares of 1 are left, on (3 - 1) (3 - 1) degrees of freedom.
    pattern = [[1, -1, 0], [-1, 1, 0], [0, 0, 0]]
    scores = {m: seeds([80.0 + 3 * m + s + pattern[m][s] for s in range(3)]) for m in range(3)}
    found = residual(scores)
    assert found is not None
    assert (found.deviation, found.df) == (pytest.approx(1.0), 4)
    d = difference(scores[2], scores[0], found)
    half = 2.776445105 * (2 / 3) ** 0.5  # the t quantile of 4 degrees of freedom, from a table
    assert d == Difference(
        pytest.approx(6.0), pytest.approx((2 / 3) ** 0.5), pytest.approx(6 - half), pytest.approx(6 + half), 3, 4
    )


@pytest.mark.parametrize("methods", [3, 6])
def test_it_is_the_residual_of_a_balanced_layout(methods: int) -> None:
    table = np.random.default_rng(methods).normal(90, 2, (methods, 4))
    left = table - table.mean(1, keepdims=True) - table.mean(0, keepdims=True) + table.mean()
    df = (methods - 1) * 3
    found = residual({m: seeds(row.tolist()) for m, row in enumerate(table)})
    assert found == Residual(pytest.approx(float((left**2).sum() / df) ** 0.5), df)


def test_a_missing_seed_costs_one_degree_of_freedom() -> None:
    """Against a slow search: the best means per method and seed cannot be improved on."""
    table = np.random.default_rng(1).normal(90, 2, (3, 3))
    scores = {m: seeds(row.tolist()) for m, row in enumerate(table)}
    del scores[2][2]
    present = [(m, s) for m, s in itertools.product(range(3), range(3)) if s in scores[m]]
    by_method, by_seed = np.zeros(3), np.zeros(3)
    for _ in range(500):  # alternating means converge to the least squares fit
        for m in range(3):
            by_method[m] = np.mean([scores[m][s] - by_seed[s] for s in scores[m]])
        for s in range(3):
            by_seed[s] = np.mean([scores[m][s] - by_method[m] for m in range(3) if s in scores[m]])
    rest = sum((scores[m][s] - by_method[m] - by_seed[s]) ** 2 for m, s in present)
    assert residual(scores) == Residual(pytest.approx(float(rest / 3) ** 0.5), 3)


def test_a_seed_has_an_effect_of_its_own_in_each_family() -> None:
    first = {"a": seeds([1.0, 2.0, 4.0]), "b": seeds([2.0, 2.5, 6.0])}
    second = {"c": seeds([9.0, 2.0, 1.0]), "d": seeds([8.5, 2.0, 0.0])}
    one, other = residual(first), residual(second)
    both = residual({**first, **second}, {"a": 1, "b": 1, "c": 2, "d": 2})
    assert one is not None
    assert other is not None
    variance = (one.deviation**2 * one.df + other.deviation**2 * other.df) / 4
    assert both == Residual(pytest.approx(variance**0.5), 4)
    assert residual({"a": {0: 1.0}, "b": {0: 2.0}}) is None, "one seed says nothing"


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    random = np.random.default_rng(0)
    hits, sets = 0, 600
    for _ in range(sets):
        table = random.normal(0, 1, (5, 1)) + random.normal(0, 3, (1, 3))
        observed = table + random.normal(0, 0.5, (5, 3))
        scores = {m: seeds(row.tolist()) for m, row in enumerate(observed)}
        d = contrast(scores[0], [(0.25, scores[1]), (0.75, scores[2])], residual(scores))
        assert d is not None
        assert d.low is not None
        assert d.high is not None
        truth = float(table[0, 0] - 0.25 * table[1, 0] - 0.75 * table[2, 0])
        hits += d.low <= truth <= d.high
    assert hits / sets == pytest.approx(0.95, abs=3 * (0.95 * 0.05 / sets) ** 0.5)


def test_only_seeds_of_both_are_compared_and_by_seed_not_by_order() -> None:
    mine = {3: 80.0, 1: 90.0, 7: 10.0}
    others = {1: 89.0, 2: 0.0, 3: 77.0}
    d = of_two(mine, others)
    interval = stats.ttest_rel([90.0, 80.0], [89.0, 77.0]).confidence_interval(0.95)
    low, high = pytest.approx(interval.low), pytest.approx(interval.high)
    assert d == Difference(2.0, pytest.approx(1.0), low, high, 2, 1)
    assert of_two({1: 1.0}, {2: 1.0}) is None


def test_one_seed_has_a_difference_and_no_interval() -> None:
    assert difference({4: 91.5}, {4: 90.0, 5: 12.0}, Residual(1.0, 10)) == Difference(1.5, None, None, None, 1)
    assert verdict(Difference(50.0, None, None, None, 1)) == "not told apart"
    assert standard_error([3.0]) is None


def test_equal_differences_have_no_interval() -> None:
    """One image of 597 in every seed: no spread, and still no result."""
    d = of_two(seeds([98.0 + 100 / 597] * 3), seeds([98.0] * 3))
    assert d is not None
    assert (d.low, d.high, d.n) == (None, None, 3)
    assert verdict(d) == "not told apart"
    last_bit = of_two(seeds([0.91, 0.96, 0.99]), seeds([0.90, 0.95, 0.98]))
    assert last_bit is not None
    assert last_bit.low is None
