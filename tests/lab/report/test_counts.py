"""How often each sample was offered and retained, by sample, by class and over time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pytest.importorskip("torchmetrics")
pytest.importorskip("torchvision")
pytest.importorskip("yaml")

from halfway.lab import data
from halfway.lab.report import counts as report_counts
from halfway.lab.training.run_folder import RunFolder
from tests.helpers.reports import tiny


def test_counts_are_those_of_a_slow_loop(compared: Path) -> None:
    paths = [compared / f"pfb-0.5-s{seed}" for seed in (0, 1)]
    found = report_counts.read(paths)
    assert found is not None
    train = data.load(tiny().data, "synthetic").train
    labels = [train.label(i) for i in range(256)]
    states = [RunFolder(path).load() for path in paths]
    for i in range(256):
        offered = sum(int(s["retention"]["offered"][i]) for s in states if s)
        retained = sum(int(s["retention"]["retained"][i]) for s in states if s)
        assert (int(found.offered[i]), int(found.retained[i])) == (offered, retained)
    for c, name in enumerate(train.classes):
        members = [i for i in range(256) if labels[i] == name]
        offered, retained = (sum(int(n[i]) for i in members) for n in (found.offered, found.retained))
        assert float(found.class_rates[c]) == pytest.approx(retained / offered)
    assert found.share == pytest.approx(0.5)
    assert int(found.offered.sum()) == 2 * 2 * 256


def test_class_rates_over_time_leave_out_rounds_that_prune_nothing() -> None:
    offered = torch.tensor([[0, 0], [4, 2], [4, 2], [2, 4], [0, 0]])
    retained = torch.tensor([[0, 0], [1, 1], [2, 1], [2, 1], [0, 0]])
    counts = report_counts.Counts(torch.zeros(3), torch.zeros(3), offered, retained)
    rates, rounds = counts.class_rates_over_time(at_most=40)
    assert rates.tolist() == [[0.25, 0.5], [0.5, 0.5], [1.0, 0.25]]
    assert rounds.tolist() == [[2, 2], [3, 3], [4, 4]]
    rates, rounds = counts.class_rates_over_time(at_most=2)
    assert rates.tolist() == [[0.375, 0.5], [1.0, 0.25]]
    assert rounds.tolist() == [[2, 3], [4, 4]]


def test_extremes_leave_out_samples_never_offered_and_prefer_what_was_offered_more() -> None:
    offered, retained = torch.tensor([0, 4, 8, 4, 6]), torch.tensor([0, 0, 0, 4, 6])
    nobody = torch.zeros(0, 0)
    counts = report_counts.Counts(offered, retained, nobody, nobody)
    assert counts.extremes(2) == ([2, 1], [4, 3])
    assert counts.extremes(10) == ([2, 1, 4, 3], [4, 3, 2, 1])
