"""Nothing stale is replayed: whatever changes between the blocker and the model is computed."""

import warnings

import pytest
import torch
from torch import nn

import halfway
from tests.helpers.replays import blocked, check_recomputed, density, gradients, plain_net, relative_difference


def test_inputs_changed_in_place_after_the_selection_are_computed(x):
    model = plain_net()
    blocker = blocked(model)
    retained = blocker(x)
    retained.mul_(2)
    with pytest.warns(UserWarning, match="changed in place"):
        found = gradients(model, retained)
    check_recomputed(model, blocker, retained, found, "changed in place")


def test_new_tensors_made_from_the_retained_samples_are_computed(x):
    model = plain_net()
    blocker = blocked(model)
    retained = blocker(x)
    mixed = 0.3 * retained + 0.7 * retained.flip(0)
    with pytest.warns(UserWarning, match="before the blocker"):
        found = gradients(model, mixed)
    check_recomputed(model, blocker, mixed, found, "not called with the tensors")


def test_parameters_that_stepped_in_between_are_seen(x):
    model = plain_net()
    blocker = blocked(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    gradients(model, x)
    retained = blocker(x)
    with pytest.warns(UserWarning, match="optimizer stepped"):
        optimizer.step()
    found = gradients(model, retained)
    check_recomputed(model, blocker, retained, found, "optimizer stepped")


@pytest.mark.parametrize("fused", [False, True])
def test_fused_optimizers_that_do_not_move_the_version_are_seen(x, fused):
    model = plain_net()
    blocker = blocked(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=fused)
    gradients(model, x)
    retained = blocker(x)
    with pytest.warns(UserWarning, match="optimizer stepped"):
        optimizer.step()
    check_recomputed(model, blocker, retained, gradients(model, retained), "optimizer stepped")


def test_parameters_written_in_between_are_seen(x):
    model = plain_net()
    blocker = blocked(model)
    retained = blocker(x)
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    with pytest.warns(UserWarning, match="parameters or buffers changed"):
        found = gradients(model, retained)
    check_recomputed(model, blocker, retained, found, "parameters or buffers changed")


class Switched(nn.Module):
    """A shallow part that a switch turns into another program, of the same shapes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.cut, self.head = nn.Identity(), nn.Linear(5, 3)
        self.mode = "first"

    def forward(self, x):
        if self.mode in ("first", "both"):
            x = self.first(x)
        if self.mode in ("second", "both"):
            x = self.second(x)
        return self.head(self.cut(x))


@pytest.mark.parametrize(
    ("probed", "called", "reason"),
    [
        ("first", "second", "other parameters than in the probe"),
        ("both", "first", "fewer operations than in the probe"),
        ("first", "both", "other operations than in the probe"),
    ],
)
def test_a_model_that_is_switched_in_between_is_computed(x, probed, called, reason):
    model = Switched()
    blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=density())
    model.mode = probed
    gradients(model, blocker(x))
    retained = blocker(x)
    model.mode = called
    with pytest.warns(UserWarning, match=reason):
        found = gradients(model, retained)
    blocker.remove()
    assert relative_difference(found, gradients(model, retained)) == 0


def test_a_second_call_in_the_same_step_computes(x):
    model = plain_net()
    blocker = blocked(model)
    retained = blocker(x)
    first = gradients(model, retained)
    second = gradients(model, retained)
    assert blocker.stats.steps_replayed == 1
    assert relative_difference(first, second) < 1e-6


def test_a_call_that_never_comes_does_not_disturb_the_next_step(x):
    model = plain_net()
    blocker = blocked(model)
    blocker(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        retained = blocker(x + 1)
    found = gradients(model, retained)
    assert blocker.stats.steps_replayed == 1
    blocker.remove()
    assert relative_difference(found, gradients(model, retained)) < 1e-6


def test_an_evaluation_in_between_neither_replays_nor_ends_the_waiting(x):
    model = plain_net()
    blocker = blocked(model, reuse="replay")
    retained = blocker(x)
    model.eval()
    with torch.no_grad():
        evaluated = model(x)
        assert torch.equal(evaluated, model(x))
    model.train()
    found = gradients(model, retained)
    assert blocker.stats.steps_replayed == 1
    blocker.remove()
    assert relative_difference(found, gradients(model, retained)) < 1e-6
    torch.testing.assert_close(evaluated, model(x))


# ------------------------------------------------------------------------------------------------ the spot check


def test_data_writes_that_nothing_shows_are_found_by_the_spot_check(x):
    model = plain_net()
    blocker = blocked(model)
    for _ in range(40):
        retained = blocker(x)
        model[0].weight.data.mul_(1.01)
        gradients(model, retained)
    with pytest.warns(UserWarning, match=r"differ.*in '0'.*between steps 0 and 40"):
        blocker.set_epoch(1)
    # From then on it is computed.
    replayed = blocker.stats.steps_replayed
    for _ in range(3):
        retained = blocker(x)
        found = gradients(model, retained)
    assert blocker.stats.steps_replayed == replayed
    assert blocker.stats.recompute_reasons == {"a spot check found that replayed and computed values differ": 3}
    blocker.remove()
    assert relative_difference(found, gradients(model, retained)) < 1e-6


def test_a_failed_spot_check_is_an_error_where_replays_are_demanded(x):
    model = plain_net()
    blocker = blocked(model, reuse="replay")
    for _ in range(40):
        retained = blocker(x)
        model[0].weight.data.mul_(1.01)
        gradients(model, retained)
    with pytest.raises(halfway.ReplayError, match=r"differ.*in '0'"):
        blocker.set_epoch(1)
