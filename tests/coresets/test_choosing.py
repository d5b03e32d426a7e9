"""From scores to ids."""

from __future__ import annotations

import pytest
import torch

from halfway.coresets import choose
from tests.helpers.draws import generator, within


def test_the_largest_scores_of_each_class_are_retained():
    source = generator(3)
    scores, labels = torch.randn(90, generator=source), torch.randint(3, (90,), generator=source)
    found = choose(scores, 0.4, labels)
    assert found.tolist() == sorted(found.tolist())
    assert len(found) == 36
    for c in range(3):
        inside = [float(scores[i]) for i in found.tolist() if labels[i] == c]
        outside = [float(scores[i]) for i in range(90) if labels[i] == c and i not in found.tolist()]
        assert min(inside) > max(outside)
    slow = sorted(range(90), key=lambda i: -float(scores[i]))[:36]
    assert choose(scores, 0.4, labels, class_balance=False).tolist() == sorted(slow)
    assert choose(scores, 0.4).tolist() == sorted(slow)


def test_equal_scores_are_chosen_at_random_by_the_seed():
    counts = torch.zeros(10)
    scores = torch.tensor([1.0] + [0.0] * 8 + [-1.0])
    for seed in range(400):
        found = choose(scores, 0.5, seed=seed)
        assert torch.equal(found, choose(scores, 0.5, seed=seed))
        counts[found] += 1
    assert counts[0] == 400
    assert counts[9] == 0
    assert all(within(count / 400, 0.5, 400) for count in counts[1:9].tolist())


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    choose(torch.zeros(10), 0.5)
    assert torch.equal(before, torch.get_rng_state())


def test_infinite_scores_are_first_or_last():
    scores = torch.tensor([0.0, torch.inf, 1.0, -torch.inf])
    assert choose(scores, 0.5).tolist() == [1, 2]
    assert 3 not in choose(scores, 0.75).tolist()


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"2 of 4 scores are NaN, for example that of sample 1; .*lower its learning"):
        choose(torch.tensor([0.0, torch.nan, 1.0, torch.nan]), 0.5)
    with pytest.raises(ValueError, match=r"one number per sample, shape \(N,\)"):
        choose(torch.zeros(4, 2), 0.5)
    with pytest.raises(ValueError, match="4 scores and 3 labels"):
        choose(torch.zeros(4), 0.5, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="whole numbers"):
        choose(torch.zeros(4), 0.5, torch.zeros(4))
    with pytest.raises(ValueError, match="numbered from 0"):
        choose(torch.zeros(4), 0.5, torch.tensor([0, 1, -1, 0]))
    with pytest.raises(ValueError, match="class 1; number"):
        choose(torch.zeros(4), 0.5, torch.tensor([0, 0, 2, 2]))
    with pytest.raises(ValueError, match="have no sample, for example class 2"):
        choose(torch.zeros(4), 0.5, torch.tensor([0, 0, 1, 1]), num_classes=3)
