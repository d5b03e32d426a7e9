"""The evidence that comes with halfway, and how it is looked up."""

from __future__ import annotations

import json

import pytest

from halfway.advice import evidence
from halfway.advice.evidence import Interval

from .invented import controls, finding, method, rung
from .invented import evidence as invented


def test_the_packaged_evidence_can_be_read_and_its_shares_are_shares() -> None:
    known = evidence.read()
    assert known.about
    assert {rung.ladder for rung in known.rungs} >= {"C", "F"}
    for each in known.rungs:
        assert all(0 <= share <= 1 for share in each.small.values())
        assert len({rung.name for rung in known.rungs}) == len(known.rungs)
        for f in each.findings:
            assert f.n >= 1
            assert 0 < f.cost < 1.5
            assert (f.p is None) == (f.gain is None or f.gain.low is None)
            if f.p is not None and f.gain is not None and f.gain.low is not None and f.gain.high is not None:
                assert (f.p < 0.05) == (f.gain.low > 0 or f.gain.high < 0)
            for interval in (f.to_full, f.gain):
                assert interval is None or interval.low is None or interval.low <= interval.mean <= (interval.high or 0)


def test_a_finding_is_read_from_plain_values() -> None:
    content = {
        "about": "x",
        "rungs": [
            {
                "name": "r",
                "ladder": "C",
                "passes": 4,
                "small": {"full": 0.5},
                "tried": 3,
                "findings": [
                    {
                        "arm": "a",
                        "role": "method",
                        "selector": "early_exit",
                        "settings": {"pick": "hard"},
                        "cut": "layer1",
                        "prune_ratio": 0.5,
                        "cost": 0.6,
                        "to_full": [-1.0, None, None],
                        "gain": None,
                        "better": None,
                        "n": 1,
                        "stage": "screen",
                        "p": 0.03,
                    }
                ],
            }
        ],
    }
    found = evidence.parsed(json.loads(json.dumps(content))).rungs[0].findings[0]
    assert found.to_full == Interval(-1.0)
    assert found.gain is None
    assert found.settings == {"pick": "hard"}
    assert found.p == 0.03


def test_an_interval_is_below_zero_only_if_all_of_it_is() -> None:
    assert Interval(-0.5, -0.9, -0.1).below
    assert not Interval(-0.5, -1.1, 0.1).below
    assert not Interval(-0.5).below
    assert str(Interval(0.5, -0.1, 1.1)) == "+0.50 [-0.10, +1.10]"


@pytest.mark.parametrize(
    ("bounds", "names"),
    [
        ((0.12, 0.6), ["b", "c"]),
        ((0.0, 1.0), ["a", "b", "c", "d"]),
        ((0.33, 0.4), ["b"]),
        ((0.95, 1.0), ["d"]),
        ((0.61, 0.64), ["d"]),
        ((0.29, 0.46), ["b", "c"]),
    ],
)
def test_the_rungs_within_a_margin_of_two_bounds_or_else_the_nearest(
    bounds: tuple[float, float], names: list[str]
) -> None:
    shares = {"d": 0.7, "a": 0.05, "b": 0.25, "c": 0.5}
    known = invented(
        *(rung(name, share, *controls(1)) for name, share in shares.items()),
        rung("without comparisons", 0.3),
        rung("beside the ladders", 0.3, *controls(1), ladder=""),
    )
    assert [r.name for r in known.near(*bounds)] == names


def test_of_equal_findings_that_with_the_most_seeds_counts() -> None:
    few, many = (method("auto", (g, g, g), n=n) for g, n in ((1.0, 3), (2.0, 13)))
    for arms in ((few, many), (many, few)):
        (found,) = rung("a", 0.2, *arms).at(0.5)
        assert found.n == 13


def test_of_an_arm_the_confirmed_finding_with_the_nearest_ratio_counts() -> None:
    gains = {
        ("screen", 0.5): 1.0,
        ("confirm", 0.3): 2.0,
        ("confirm", 0.7): 3.0,
    }
    arms = [method("order_dp", (g, g, g), stage=s, prune_ratio=p) for (s, p), g in gains.items()]
    other = method("order_dp", (9, 9, 9), settings={"pool": 0.5}, stage="screen")
    found = {(f.selector, len(f.settings)): f for f in rung("a", 0.2, *arms, other).at(0.6)}
    first = found["order_dp", 0]
    assert (first.stage, first.prune_ratio) == ("confirm", 0.7)
    assert found["order_dp", 1] is other
    assert finding("random", None).same != finding("shorter", None).same
