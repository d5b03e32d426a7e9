"""The words for a comparison: a winner exactly where the t test has one, and never a claim that two do equally well."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")
pytest.importorskip("yaml")

import numpy as np
from scipy import stats

from halfway.lab.comparison import results as recorded
from halfway.lab.comparison import table
from halfway.lab.comparison.curves import Standing
from halfway.lab.comparison.paired import Difference, difference, residual, standard_error
from halfway.lab.comparison.results import Row
from halfway.lab.comparison.trials import Group
from halfway.lab.comparison.verdict import against, headline, judged, reading, verdict
from tests.lab.comparison.test_table import RECIPE, SESSION

RESULTS = Path(__file__).parents[3] / "results"
LOW, HIGH, FULL = [95.0, 95.1, 94.9], [98.0, 98.2, 97.9], [98.0, 98.0, 98.0]
# What no interval carries.
EQUIVALENCE = re.compile("as well|as good|within noise|equal(ly)? |no difference|the same as|bought nothing")


def rows_of(**scores: Sequence[float]) -> list[Row]:
    """Made-up rows: full, and METHOD_RATIO with ratios in tenths."""
    seeds = {key: dict(enumerate(values)) for key, values in scores.items()}

    def minus(key: str, rival: str) -> Any:
        if rival not in seeds or rival == key:
            return None
        return difference(seeds[key], seeds[rival], residual({one: seeds[one] for one in (key, rival)}))

    rows = []
    for key, values in seeds.items():
        method, _, tenths = key.partition("_")
        flops = {"full": (1.0, 1.0), "random": (0.5, 0.6)}.get(method, (0.53, 0.624))
        rows.append(
            Row(
                group=Group(method, int(tenths) / 10 if tenths else None),
                scores=values,
                mean=sum(values.values()) / len(values),
                error=standard_error(list(values.values())),
                minus_full=minus(key, "full"),
                minus_random=minus(key, f"random_{tenths}"),
                minus_random_at_cost=None,
                effective_ratio=(0.5, 0.4),
                flops=flops,
                cost=flops[1],
                seconds=1.0,
                wall=None,
            )
        )
    return rows


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (-1, 1, "not told apart"),
        (0, 1, "not told apart"),
        (-1, 0, "not told apart"),
        (0.01, 1, "better"),
        (-1, -0.01, "worse"),
    ],
)
def test_a_difference_is_told_if_its_interval_leaves_out_zero(low: float, high: float, word: str) -> None:
    assert verdict(Difference((low + high) / 2, 0.1, low, high, 3)) == word


def test_headline_and_table_have_a_winner_exactly_where_the_t_test_does() -> None:
    generator = np.random.default_rng(0)
    verdicts = set()
    for _ in range(60):
        n = int(generator.integers(2, 7))
        full = generator.normal(90, 2, n)
        random = full + generator.normal(generator.choice([-3, -1, 0, 1]), 1, n)
        pfb = full + generator.normal(generator.choice([-3, 0, 3]), 1, n)
        rows = rows_of(full=full.tolist(), random_5=random.tolist(), pfb_5=pfb.tolist())
        page = table.markdown(rows, "x", RECIPE, SESSION, {"steps": {}})
        for rival, other, sentence in zip(
            ("random pruning at the same ratio", "full data"), (random, full), reading(rows)[:2], strict=True
        ):
            better = float((pfb - other).mean()) > 0
            told = "not told apart from" if stats.ttest_rel(pfb, other).pvalue >= 0.05 else None
            told = told or ("better than" if better else "worse than")
            assert f"pfb, p = 0.5: {told} {rival} ({float((pfb - other).mean()):+.2f} [" in sentence
            assert f"- {sentence}\n" in page
            if rival.startswith("random"):
                assert f"PFB was {told} random pruning by" in headline(rows)
            assert not EQUIVALENCE.search(sentence)
            verdicts.add(told)
    assert len(verdicts) == 3, "all three were seen"


def test_a_narrow_interval_around_zero_is_no_claim_of_equality() -> None:
    rows = rows_of(full=FULL, random_5=[97.5, 98.0, 97.5], pfb_5=[98.0, 97.5, 97.6])
    assert headline(rows) == "At p = 0.5 PFB was not told apart from random pruning by 3 seeds"
    assert not EQUIVALENCE.search(" ".join(reading(rows)))


def test_one_seed_never_has_a_winner() -> None:
    rows = rows_of(full=[2.0], random_5=[1.0], pfb_5=[99.0])
    assert headline(rows) == "At p = 0.5 PFB was not told apart from random pruning by 1 seed"
    assert reading(rows)[:2] == [
        "pfb, p = 0.5: not told apart from random pruning at the same ratio (+98.00 points, 1 seed).",
        "pfb, p = 0.5: not told apart from full data (+97.00 points, 1 seed).",
    ]


def test_ratios_with_the_same_verdict_share_a_clause() -> None:
    slightly = [v - n for v, n in zip(HIGH, (1.0, 1.1, 0.9), strict=True)]
    rows = rows_of(random_3=HIGH, random_5=HIGH, random_7=LOW, pfb_3=slightly, pfb_5=LOW, pfb_7=HIGH)
    assert headline(rows) == (
        "At p = 0.7 PFB was better than random pruning by 3.0 points; at p = 0.3 and 0.5 PFB was worse than random "
        "pruning by 1.0 to 3.0 points"
    )


def test_without_random_pruning_full_data_is_the_rival() -> None:
    assert headline(rows_of(full=FULL, pfb_5=LOW)) == "At p = 0.5 PFB was worse than full data by 3.0 points"
    assert headline(rows_of(full=FULL, random_5=LOW)) == (
        "At p = 0.5 random pruning was worse than full data by 3.0 points"
    )
    assert headline(rows_of(full=FULL)) == "Full data: 98.00 % (n = 3)"


def test_many_settings_are_counted() -> None:
    scores = {f"random_{i}": HIGH for i in range(1, 8)} | {f"pfb_{i}": LOW for i in range(1, 7)} | {"pfb_7": HIGH}
    rows = rows_of(**scores)
    assert headline(rows) == "PFB against random pruning: of 7 settings worse in 6, not told apart in 1"
    assert reading(rows)[0] == (
        "PFB against random pruning at the same ratio: of 7 settings worse in 6, not told apart in 1."
    )


def test_other_methods_are_told_apart_from_random_only_where_the_intervals_do() -> None:
    rows = rows_of(
        random_5=[80.0, 81.0, 80.5], rotate_5=[85.0, 86.1, 85.5], ucb_5=[70.0, 71.1, 70.4], loss_5=[79.0, 83.0, 80.0]
    )
    assert reading(rows) == [
        "Of 3 other methods, against random pruning at the same ratio: better rotate, p = 0.5. Worse ucb, p = 0.5. The "
        "others are not told apart."
    ]


def test_costs_are_those_of_the_ratio_nearest_to_one_half() -> None:
    rows = rows_of(random_5=LOW, pfb_5=HIGH, random_7=LOW, pfb_7=HIGH)
    assert reading(rows)[-1].startswith("At p = 0.5 a pruned step cost 0.530 of a full one with PFB and 0.500 with")


def test_without_a_rival_nothing_is_said() -> None:
    assert reading(rows_of(pfb_5=HIGH)) == []
    assert reading(rows_of(full=FULL, random_5=LOW)) == []


# -------------------------------------------------------------------- controls

BETTER, WORSE, NEITHER = Difference(1, 0.2, 0.5, 1.5, 3), Difference(-2, 0.2, -2.5, -1.5, 3), Difference(1, 1, -1, 3, 3)


def beside(group: Group, **controls: Difference) -> Row:
    (made_up,) = rows_of(pfb_5=HIGH)
    standings = {name: Standing(d) for name, d in controls.items()}
    return dataclasses.replace(made_up, group=group, controls=standings)


PFB = Group("pfb", 0.5)


@pytest.mark.parametrize(
    ("even", "shorter", "word"),
    [
        (BETTER, BETTER, "better"),
        (BETTER, NEITHER, "not told apart"),
        (NEITHER, BETTER, "not told apart"),
        (NEITHER, NEITHER, "not told apart"),
        (BETTER, WORSE, "worse"),
        (WORSE, BETTER, "worse"),
        (WORSE, NEITHER, "worse"),
        (WORSE, WORSE, "worse"),
    ],
)
def test_a_method_is_better_only_than_both_controls_and_worse_than_either(
    even: Difference, shorter: Difference, word: str
) -> None:
    row = beside(PFB, random_even=even, shorter=shorter)
    assert judged(row) == word
    assert reading([row])[0].startswith(f"pfb, p = 0.5: {word}. ")
    assert f"PFB was {word}" in headline([row])


def test_a_method_without_both_controls_is_not_judged() -> None:
    assert judged(beside(PFB, random_even=BETTER)) is None
    assert judged(beside(PFB)) is None
    assert reading([beside(PFB, shorter=BETTER)]) == []


def test_controls_and_full_data_are_not_judged() -> None:
    for method in ("full", "random_even", "shorter", "smaller_batch"):
        assert judged(beside(Group(method, 0.5), random_even=BETTER, shorter=BETTER)) is None


def test_methods_that_take_fewer_steps_are_judged_beside_rs2() -> None:
    sampler = Group("infobatch", 0.5)
    assert judged(beside(sampler, random_even=WORSE, shorter=BETTER)) is None
    row = beside(sampler, rs2=BETTER, shorter=BETTER)
    assert judged(row) == "better"
    assert "Better than random pruning per epoch (" in reading([row])[0]
    assert judged(beside(Group("rs2", 0.5), random_even=WORSE, shorter=BETTER)) == "worse"


def test_the_headline_names_the_controls_that_decide() -> None:
    assert headline([beside(PFB, random_even=NEITHER, shorter=WORSE)]) == (
        "At p = 0.5 PFB was worse than full data for fewer steps by 2.0 points, each at the same cost"
    )
    assert headline([beside(PFB, random_even=BETTER, shorter=NEITHER)]) == (
        "At p = 0.5 PFB was not told apart from full data for fewer steps by 3 seeds, each at the same cost"
    )


def test_many_methods_beside_their_controls_are_listed_by_their_word() -> None:
    rows = [beside(Group("rotate", p / 10), random_even=BETTER, shorter=BETTER) for p in range(1, 7)]
    rows.append(beside(Group("last_loss", 0.5), random_even=WORSE, shorter=BETTER))
    (sentence,) = reading(rows)
    assert "better rotate, p = 0.1; rotate, p = 0.2;" in sentence
    assert "Worse last_loss, p = 0.5." in sentence


@pytest.mark.parametrize("folder", sorted(path.parent for path in RESULTS.glob("*/results.json")), ids=lambda p: p.name)
def test_the_committed_tables_say_what_their_numbers_carry(folder: Path) -> None:
    read = recorded.read(folder)
    assert read is not None
    page = (folder / "table.md").read_text()
    for sentence in reading(read.rows):
        assert f"- {sentence}\n" in page
    assert not EQUIVALENCE.search(page)


@pytest.mark.parametrize("folder", sorted(path.parent for path in RESULTS.glob("*/results.json")), ids=lambda p: p.name)
def test_the_committed_pages_say_what_their_tables_say(folder: Path) -> None:
    read = recorded.read(folder)
    assert read is not None
    page = (folder / "report.html").read_text().replace("−", "-").replace("\u00a0", " ")
    for row in read.rows:
        assert f'data-label="{row.group.label}"' in page
        for d, rival in ((row.minus_random, "random, same ratio"), (row.minus_full, "full data")):
            assert d is None or against(d, rival) in page
    assert not re.search("as well as|within noise", page)
