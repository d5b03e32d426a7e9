"""Uneven classes are named, chance is not taken for them."""

from __future__ import annotations

import pytest
import torch

from halfway.advice import advice, advise
from halfway.advice.classes import ClassesSeen, note_on

from .invented import Ticking, evidence, method, net, rung


def seen(*counts: int) -> ClassesSeen:
    found = ClassesSeen()
    for targets in torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).split(7):
        found.note(targets)
    return found


def test_the_rarest_and_the_most_frequent_class_are_counted() -> None:
    assert seen(100, 60, 20, 10, 3).uneven == (3, 100)
    assert seen(79, 60, 20, 10, 3).uneven is None, "not four times as many as the class in the middle"
    assert seen(40, 5, 4, 4).uneven is None, "too few to tell"


@pytest.mark.parametrize("classes", [2, 10, 100, 1000])
def test_even_classes_are_never_called_uneven(classes: int) -> None:
    draw = torch.Generator().manual_seed(classes)
    for size in (50, 500, 5000, 20000):
        for _ in range(20):
            found = ClassesSeen()
            found.note(torch.randint(classes, (size,), generator=draw))
            assert found.uneven is None


def test_targets_that_are_no_classes_are_left_out() -> None:
    found = ClassesSeen()
    for targets in (torch.zeros(8), torch.zeros(8, 4, 4).long(), {"boxes": torch.zeros(3)}, None):
        found.note(targets)
    found.note(torch.full((8,), -100))
    assert found.uneven is None
    assert note_on(found, evidence()) == []


def test_targets_that_are_no_classes_are_named() -> None:
    (note,) = note_on(ClassesSeen(), evidence())
    assert "All evidence is on the classification of images" in note


def test_the_note_says_what_was_measured_on_long_tails() -> None:
    tail = rung("tailed", 0.3, method("class_balanced", (6.9, 5.8, 7.9)), ladder="")
    (note,) = note_on(seen(100, 60, 20, 10, 3), evidence(tail))
    assert "the rarest was seen 3 times, the most frequent 100 times" in note
    assert "+6.90 [+5.80, +7.90] points on tailed (n = 5)" in note
    (without,) = note_on(seen(100, 60, 20, 10, 3), evidence())
    assert "reduced scale" not in without


def test_advice_names_uneven_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    Ticking.time, Ticking.tick = 0.0, 0.01
    monkeypatch.setattr(advice, "Clock", Ticking)
    y = torch.tensor([0] * 40 + [1] * 6 + [2] * 2)
    y = y[torch.randperm(48, generator=torch.Generator().manual_seed(0))]
    loader = list(zip(torch.randn(48, 4).split(8), y.split(8), strict=True))
    assert "The classes are uneven" in str(advise(net(), loader, epochs=3, seconds=20, evidence=evidence()))
