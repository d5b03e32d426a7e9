"""What a training shows: against a loop over every presentation."""

from __future__ import annotations

import itertools

import pytest
import torch

from halfway.coresets import Dynamics
from tests.helpers.draws import generator

N, C = 12, 4


def presentations(count=40, seed=1):
    source = generator(seed)
    labels = torch.randint(C, (N,), generator=source)
    for _ in range(count):
        ids = torch.randperm(N, generator=source)[:5]
        yield ids, 2 * torch.randn(5, C, generator=source), labels[ids]


def test_a_record_is_that_of_a_loop():
    record = Dynamics(N)
    history: dict[int, list[tuple[bool, float]]] = {i: [] for i in range(N)}
    for ids, logits, targets in presentations():
        record.observe(ids, logits, targets)
        for i, row, label in zip(ids.tolist(), logits.tolist(), targets.tolist(), strict=True):
            others = [value for c, value in enumerate(row) if c != label]
            history[i].append((row[label] > max(others), row[label] - max(others)))
    for i, seen in history.items():
        right = [correct for correct, _ in seen]
        assert int(record.presentations_N[i]) == len(seen)
        assert int(record.forgotten_N[i]) == sum(a and not b for a, b in itertools.pairwise(right))
        assert bool(record.learned_N[i]) == any(right)
        assert float(record.margins_N[i]) == pytest.approx(sum(m for _, m in seen) / len(seen), abs=1e-5)
    assert int(record.forgotten_N.max()) > 1


def test_a_first_mistake_is_no_forgetting_and_a_tie_is_no_success():
    record = Dynamics(2)
    ids, targets = torch.arange(2), torch.zeros(2, dtype=torch.int64)
    record.observe(ids, torch.tensor([[0.0, 1.0], [1.0, 1.0]]), targets)
    assert record.forgotten_N.tolist() == [0, 0]
    assert record.learned_N.tolist() == [False, False]


def test_a_record_goes_on_after_an_interruption():
    whole, first, second = Dynamics(N), Dynamics(N), Dynamics(N)
    steps = list(presentations())
    for step in steps:
        whole.observe(*step)
    for step in steps[:17]:
        first.observe(*step)
    state = {name: value.clone() for name, value in first.state_dict().items()}
    second.load_state_dict(state)
    for step in steps[17:]:
        second.observe(*step)
    assert torch.equal(second.state_dict()["values"], whole.state_dict()["values"])
    assert torch.equal(Dynamics.of(state).margins_N, first.margins_N)


def test_a_step_that_diverged_leaves_the_sample_as_it_was():
    record = Dynamics(2)
    ids, targets = torch.arange(2), torch.zeros(2, dtype=torch.int64)
    record.observe(ids, torch.tensor([[3.0, 1.0], [3.0, 1.0]]), targets)
    record.observe(ids, torch.tensor([[torch.nan, 1.0], [1.0, 2.0]]), targets)
    assert record.presentations_N.tolist() == [1, 2]
    assert record.margins_N.tolist() == [2.0, 0.5]
    assert record.forgotten_N.tolist() == [0, 1]


def test_bad_input_is_refused():
    record = Dynamics(3)
    with pytest.raises(ValueError, match="mixup"):
        record.observe(torch.arange(2), torch.zeros(2, 2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="the id 3"):
        record.observe(torch.tensor([3]), torch.zeros(1, 2), torch.tensor([0]))
    record.observe(torch.arange(2), torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"1 of 3 samples were never presented.*example 2"):
        record.check()


def test_no_step_waits_for_the_device():
    record = Dynamics(N)
    with torch.device("meta"):
        ids = torch.zeros(5, dtype=torch.int64)
        logits, targets = torch.zeros(5, C), torch.zeros(5, dtype=torch.int64)
    record.observe(ids, logits, targets)  # a wait would need a value, which a meta tensor has not
