"""The sentences of a report: no claim that the intervals do not carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pytest.importorskip("torchmetrics")
pytest.importorskip("torchvision")
pytest.importorskip("yaml")

from halfway.lab.comparison import table as summary
from halfway.lab.comparison.paired import difference, standard_error
from halfway.lab.comparison.trials import Group, group_of
from halfway.lab.report import words as report_words
from halfway.lab.report.runs import Runs
from tests.lab.comparison.test_table import result


def rows_of(**scores: Sequence[float]) -> list[summary.Row]:
    """Made-up rows: full, and METHOD_RATIO with ratios in tenths."""
    seeds = {key: dict(enumerate(values)) for key, values in scores.items()}

    def minus(key: str, rival: str) -> Any:
        return difference(seeds[key], seeds[rival]) if rival in seeds and rival != key else None

    rows = []
    for key, values in seeds.items():
        method, _, tenths = key.partition("_")
        group = Group(method, int(tenths) / 10 if tenths else None)
        rows.append(
            summary.Row(
                group,
                values,
                sum(values.values()) / len(values),
                standard_error(list(values.values())),
                minus(key, "full"),
                minus(key, f"random_{tenths}"),
                None,
                (0.5, 0.4),
                {"full": (1.0, 1.0), "random": (0.5, 0.6)}.get(method, (0.53, 0.624)),
                1.0,
                None,
            )
        )
    return rows


LOW, HIGH, FULL = [95.0, 95.1, 94.9], [98.0, 98.2, 97.9], [98.0, 98.0, 98.0]


def test_pfb_better_is_said_and_not_more() -> None:
    rows = rows_of(full=FULL, random_5=LOW, pfb_5=HIGH)
    assert report_words.headline(rows) == "At p = 0.5 PFB beat random pruning by 3.0 points"
    text = " ".join(report_words.reading(rows, Group("pfb", 0.5)))
    assert "better, beyond the noise of 3 seeds" in text
    assert "PFB ended 0.0 points above it (within noise)" in text
    assert "bought nothing" not in text


def test_random_better_is_said_plainly() -> None:
    rows = rows_of(full=FULL, random_5=HIGH, pfb_5=LOW)
    assert report_words.headline(rows) == "At p = 0.5 random pruning beat PFB by 3.0 points"
    text = " ".join(report_words.reading(rows, Group("pfb", 0.5)))
    assert "worse, beyond the noise of 3 seeds" in text
    assert "bought nothing" in text


def test_random_as_good_is_said_plainly() -> None:
    rows = rows_of(full=FULL, random_5=[97.5, 98.0, 97.5], pfb_5=[98.0, 97.5, 97.6])
    assert report_words.headline(rows) == "At p = 0.5 random pruning did as well as PFB, within noise"
    text = " ".join(report_words.reading(rows, Group("pfb", 0.5)))
    assert "as far as 3 seeds can tell, random did as well" in text
    assert "bought nothing" in text
    assert "better" not in text


def test_a_wide_interval_is_not_taken_for_equality() -> None:
    rows = rows_of(random_5=[90.0, 95.0], pfb_5=[93.0, 92.0])
    assert report_words.headline(rows) == "At p = 0.5 PFB and random pruning could not be told apart by 2 seeds"
    text = " ".join(report_words.reading(rows, Group("pfb", 0.5)))
    assert "either may be better" in text
    assert "bought nothing" not in text


def test_one_seed_carries_no_verdict() -> None:
    rows = rows_of(full=[99.0], random_5=[95.0], pfb_5=[98.0])
    assert report_words.headline(rows) == "At p = 0.5 PFB ended 3.0 points above random pruning, on one seed"
    text = " ".join(report_words.reading(rows, Group("pfb", 0.5)))
    assert "a single seed cannot tell" in text
    assert "better" not in text
    assert "bought nothing" not in text


def test_another_ratio_with_one_seed_is_marked_as_such() -> None:
    rows = rows_of(random_3=[95.0], random_5=LOW, pfb_3=[96.0], pfb_5=HIGH)
    assert "The same at p = 0.3: +1.00 (one seed)." in report_words.reading(rows, Group("pfb", 0.5))


def test_ratios_with_the_same_verdict_share_a_clause() -> None:
    slightly = [v - 1 for v in HIGH]
    rows = rows_of(random_3=HIGH, random_5=HIGH, random_7=LOW, pfb_3=slightly, pfb_5=LOW, pfb_7=HIGH)
    assert report_words.headline(rows) == (
        "At p = 0.3 and 0.5 random pruning beat PFB by 1.0 to 3.0 points; at p = 0.7 PFB beat random pruning by "
        "3.0 points"
    )


def test_without_random_pruning_full_data_is_the_rival() -> None:
    assert report_words.headline(rows_of(full=FULL, pfb_5=LOW)) == "At p = 0.5 full data beat PFB by 3.0 points"
    assert report_words.headline(rows_of(full=FULL, random_5=LOW)) == (
        "At p = 0.5 full data beat random pruning by 3.0 points"
    )
    assert report_words.headline(rows_of(full=FULL)) == "Full data: 98.00 % (n = 3)"


def test_of_many_methods_figures_with_a_line_each_show_the_best() -> None:
    """Full data, random and PFB at its ratio, and the best of the others; all of them where they are few."""
    scores = {"full": 90.0, "random": 50.0, "pfb": 40.0, "rotate": 80.0, "ucb": 10.0, "rs2": 70.0, "loss": 60.0}
    groups: Any = {}
    for method, score in scores.items():
        groups[group_of(method, 0.5, {})] = {0: result(method, 0.5, 0, score)}
    groups[group_of("random", 0.3, {})] = {0: result("random", 0.3, 0, 95.0)}
    shown = Runs(groups, [], {}).shown
    assert [group.label for group in shown] == [
        "full",
        *(f"{method}, p = 0.5" for method in ("random", "pfb", "rotate", "rs2", "loss")),
    ]
    few = {group: seeds for group, seeds in groups.items() if group.method in ("full", "random", "pfb", "ucb")}
    assert Runs(few, [], {}).shown == few
