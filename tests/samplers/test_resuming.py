"""The state of a sampler: a run goes on where it stopped, and another configuration is refused."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from halfway import Schedule
from halfway.samplers import (
    RS2,
    InfoBatch,
    make,
)
from tests.helpers.sampled import EVERY, N, feed, leaves, loss_table

# Most trainings here are shorter than its window; the tests of the warning ask for it.
pytestmark = pytest.mark.filterwarnings("ignore:dyn_unc")


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_a_run_that_stops_within_an_epoch_goes_on_with_the_rest_of_it(name: str, options: dict[str, Any]) -> None:
    epochs, stop_at, done, table = 6, 3, 5, loss_table(6)
    options = {**options, "period": 2} if name in ("ucb", "epsilon_greedy") else options
    options = {**options, "window": 2} if name == "dyn_unc" else options

    def new() -> Any:
        return make(name, N, 0.4, schedule=Schedule(1), seed=4, **options)

    whole, file, seen = new(), io.BytesIO(), []
    for epoch in range(epochs):
        whole.set_epoch(epoch)
        order = list(whole)
        seen.append([(int(i), i.weight) for i in order])
        if epoch == stop_at:
            feed(whole, table[epoch], order[:done])
            torch.save(whole.state_dict(), file)
            feed(whole, table[epoch], order[done:])
        else:
            feed(whole, table[epoch])

    file.seek(0)
    resumed = new()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for epoch in range(stop_at, epochs):
        skip = done if epoch == stop_at else 0
        resumed.set_epoch(epoch, skip=skip)
        assert [(int(i), i.weight) for i in resumed] == seen[epoch][skip:]
        assert len(resumed) == len(seen[epoch]) - skip
        feed(resumed, table[epoch])
    assert resumed.effective_ratio == whole.effective_ratio
    for ours, theirs in zip(leaves(resumed.state_dict()), leaves(whole.state_dict()), strict=True):
        assert torch.equal(ours.nan_to_num(-1), theirs.nan_to_num(-1)) if torch.is_tensor(ours) else ours == theirs


def test_a_state_does_not_change_any_more_and_has_the_same_shapes_before_and_after() -> None:
    sampler = InfoBatch(N, 0.5)
    fresh = sampler.state_dict()
    sampler.set_epoch(0)
    state = sampler.state_dict()
    before = copy.deepcopy(state)
    sampler.observe(torch.arange(N), torch.rand(N))
    sampler.set_epoch(1)
    for a, b, c in zip(leaves(state), leaves(before), leaves(fresh), strict=True):
        assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1)) if torch.is_tensor(a) else a == b
        assert not torch.is_tensor(a) or a.shape == c.shape


def test_the_state_of_another_configuration_is_refused_with_the_differences() -> None:
    state = InfoBatch(N, 0.5, seed=1).state_dict()
    with pytest.raises(ValueError, match=r"infobatch.threshold: 'mean' in the state, 0.95 here; seed: 1 .* 0 here"):
        InfoBatch(N, 0.5, threshold=0.95).load_state_dict(state)
    with pytest.raises(ValueError, match=r"sampler: 'infobatch' in the state, 'rs2' here"):
        RS2(N, 0.5, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match=r"schedule.start: 0 in the state, 2 here"):
        InfoBatch(N, 0.5, seed=1, schedule=Schedule(2)).load_state_dict(state)
    sampler = InfoBatch(N, 0.5, seed=1)
    for broken in ({}, {**state, "version": 9}, {**state, "config": "?"}, {**state, "retained": torch.ones(3)}):
        with pytest.raises(ValueError, match=r"not the state_dict|version 9|shape \(30,\)"):
            sampler.load_state_dict(broken)
