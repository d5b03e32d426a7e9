"""What training reports to a batch sampler: losses and watched layers that come, do not come, or make no sense."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor

import halfway
from halfway.selectors import BalancedRemembered
from halfway.state.host_copy import HostCopy
from tests.helpers.loaded import B, N, Run, data, net


def test_the_largest_lag_is_that_of_reports_and_travels() -> None:
    run = Run(workers=1)
    list(run.loader)
    assert run.batches.stats.lag == 0, "nothing was ever reported"
    with pytest.warns(UserWarning, match="got none in the last epoch"):
        run.epoch(1)
    other = Run(workers=1)
    other.batches.load_state_dict(run.batches.state_dict())
    assert other.batches.stats.lag == run.batches.stats.lag > 0


def test_outside_the_schedule_nothing_is_explained() -> None:
    run = Run("auto", schedule=halfway.Schedule(0, 1), targets=data().tensors[1])
    run.epoch(0)
    assert "draws at random" in run.batches.stats.explanation
    run.epoch(1)
    assert run.batches.stats.explanation == ""


def test_a_report_is_read_back_in_the_next_epoch_and_not_while_training_computes_it(monkeypatch) -> None:
    """Workers draw ahead, so that most reports of a short epoch come when it is drawn."""
    run, read = Run(workers=2), []
    value = HostCopy.value
    monkeypatch.setattr(HostCopy, "value", lambda copied: (read.append(copied), value(copied))[1])
    observe = run.batches.observe

    def observed(ids: Tensor, losses: Tensor) -> None:
        before = len(read)
        observe(ids, losses)
        assert len(read) == before

    monkeypatch.setattr(run.batches, "observe", observed)
    run.epoch(0)
    run.epoch(1)
    assert len(read) >= N // B


def test_the_warning_of_missing_losses_comes_again_after_another_state_was_loaded() -> None:
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector="last_loss")
    state = copy.deepcopy(batches.state_dict())
    for _ in range(2):
        batches.set_epoch(0)
        list(batches)
        with pytest.warns(UserWarning, match="got none in the last epoch"):
            batches.set_epoch(1)
        batches.load_state_dict(state)


def test_losses_that_never_come_are_warned_about() -> None:
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector="last_loss")
    list(batches)
    with pytest.warns(UserWarning, match=r"call batches\.observe\(ids, losses\)"):
        list(batches)
    list(batches)  # once


def test_losses_that_came_before_a_run_was_resumed_are_not_missed() -> None:
    first = halfway.PrunedBatchSampler(data(), B, 0.5, selector="last_loss")
    first.set_epoch(0)
    for batch in first:
        first.observe(torch.tensor(batch), torch.ones(len(batch)))
    states = [copy.deepcopy(first.state_dict())]
    first.set_epoch(1)  # where nothing has been reported yet
    states.append(first.state_dict())
    for state, epoch in zip(states, (1, 2), strict=True):
        second = halfway.PrunedBatchSampler(data(), B, 0.5, selector="last_loss")
        second.load_state_dict(state)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second.set_epoch(epoch)


def test_what_a_selector_does_is_explained_of_its_own_choices_alone() -> None:
    first = halfway.PrunedBatchSampler(data(), B, 0.5, selector="auto", targets=data().tensors[1])
    for batch in first:
        first.observe(torch.tensor(batch), torch.ones(len(batch)))
    assert first.stats.explanation.startswith("draws ")
    first.load_state_dict(copy.deepcopy(first.state_dict()))
    assert first.stats.explanation == ""


def test_narrow_ids_reach_a_memory_that_is_larger_than_their_type() -> None:
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector="last_loss")
    for end in (20_000, 30_000, 32_767):  # the memory grows by doubling, beyond what 16 bits hold
        batches.observe(torch.tensor([1, end - 1], dtype=torch.int16), torch.ones(2))
    assert batches.state_dict()["selector"]["losses"].isfinite().sum() == 4


def test_a_selector_that_learns_from_the_model_must_be_shown_it() -> None:
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector="balanced_remembered")
    with pytest.raises(RuntimeError, match=r"batches\.watch\(model\)"):
        next(iter(batches))


def test_what_is_remembered_is_what_entered_the_last_layer() -> None:
    model = net()
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector=BalancedRemembered(dim=32, use_loss=False))
    batches.watch(model)
    batches.set_epoch(0)
    x, _y = data().tensors
    for batch in list(batches):
        model(x[batch])
        batches.observe(torch.tensor(batch))
        with torch.no_grad():
            model(x[:2])  # an evaluation in between is not meant
    found = batches.state_dict()["selector"]["features"]
    seen = ~found[:, 0].isnan()
    assert seen.sum() == N // 2
    torch.testing.assert_close(found[seen, :12], model[:2](x)[seen[:N]].detach())


def test_a_report_of_other_samples_than_the_model_saw_is_an_error() -> None:
    model = net()
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector="balanced_remembered")
    batches.watch(model)
    batches.set_epoch(0)
    ids = torch.tensor(next(iter(batches)))
    with pytest.raises(RuntimeError, match="was not called in training mode"):
        batches.observe(ids, torch.ones(len(ids)))
    model(torch.randn(3, 6))
    with pytest.raises(ValueError, match="last called on 3 samples"):
        batches.observe(ids, torch.ones(len(ids)))


@pytest.mark.parametrize(
    ("ids", "losses", "message"),
    [
        (torch.zeros(3), torch.ones(3), "whole numbers"),
        ([1, 2], torch.ones(2), "whole numbers"),
        (torch.arange(3), torch.ones(2), "one loss per sample|shape"),
        (torch.arange(3), None, "learns from losses"),
    ],
)
def test_a_report_that_makes_no_sense_is_an_error(ids, losses: Tensor | None, message: str) -> None:
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector="last_loss")
    with pytest.raises(ValueError, match=message):
        batches.observe(ids, losses)


def test_losses_that_are_not_finite_are_raised_with_the_next_epoch() -> None:
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector="last_loss")
    batches.set_epoch(0)
    list(batches)
    batches.observe(torch.arange(4), torch.tensor([1.0, float("nan"), 2.0, 3.0]))
    with pytest.raises(FloatingPointError, match="not finite"):
        batches.set_epoch(1)


def test_a_lag_holds_back_what_a_watched_layer_showed() -> None:
    model = net()
    selector = BalancedRemembered(dim=32, use_loss=False)
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector=selector, lag=2)
    batches.watch(model)
    x = data().tensors[0]
    known = []
    for batch in batches:
        known.append(int((~selector.state_dict()["features"][:, :1].isnan()).sum()))
        model(x[batch])
        batches.observe(torch.tensor(batch))
    assert known == [0, 0, 8, 16, 24, 32], "batch k knows the batches up to k - 2"
    assert batches.stats.lag == 1


def test_a_watched_model_can_be_saved_whole_and_let_go(tmp_path) -> None:
    model = net()
    batches = halfway.PrunedBatchSampler(data(), B, 0.5, selector="balanced_remembered")
    batches.watch(model)
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    x = data().tensors[0]
    assert torch.equal(again(x), model(x))
    batches.close()
    assert vars(model[-1]).keys() == vars(net()[-1]).keys()
