"""What all selectors that look at the model's outputs promise."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfway import ForwardBlocker, Schedule
from halfway.selectors import Loss, LossRank
from halfway.selectors.divbs import DivBS
from halfway.selectors.grad_norm import GradNorm
from halfway.selectors.rho import Rho
from halfway.selectors.selective_backprop import SelectiveBackprop
from halfway.selectors.uncertainty import Uncertainty
from tests.helpers.classified import (
    CLASSES,
    candidates,
    history_of,
)
from tests.helpers.draws import generator, within
from tests.helpers.waiting import NoWaiting

MEASURES = ("entropy", "least_confidence", "margin")

EVERYBODY = {
    "loss": Loss,
    "loss_rank": LossRank,
    "selective_backprop": lambda: SelectiveBackprop(history=32),
    "grad_norm": GradNorm,
    "divbs": DivBS,
    "rho": lambda: Rho(torch.linspace(0, 1, 20)),
    **{f"uncertainty, {measure}": lambda measure=measure: Uncertainty(measure) for measure in MEASURES},
}
DETERMINISTIC = [name for name in EVERYBODY if name not in ("loss_rank", "selective_backprop", "grad_norm")]


def full_batch(seed=0, size=20, order=None, **changes):
    torch.manual_seed(seed)
    parts = {
        "outputs": torch.randn(size, CLASSES),
        "targets": torch.randint(CLASSES, (size,)),
        "watched": torch.randn(size, 7),
        "ids": torch.arange(size),
    }
    parts.update(changes)
    if order is not None:
        parts = {name: part[order] for name, part in parts.items()}
    return parts


@pytest.mark.parametrize("name", EVERYBODY)
def test_exactly_the_asked_number_of_rows_in_order(name):
    for seed, count in enumerate([1, 7, 19]):
        found = EVERYBODY[name]().select(candidates(seed=seed, **full_batch(seed)), count)
        assert found.indices.dtype == torch.int64
        assert found.indices.shape == (count,)
        assert (found.indices.diff() > 0).all()
        assert found.importance is None or found.importance.shape == (20,)
        assert found.weights is None or found.weights.shape == (count,)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_shuffling_the_batch_shuffles_the_choice(name):
    order = torch.randperm(20, generator=generator(1))
    straight = EVERYBODY[name]().select(candidates(**full_batch()), 8).indices
    shuffled = EVERYBODY[name]().select(candidates(seed=1, **full_batch(order=order)), 8).indices
    assert sorted(order[shuffled].tolist()) == straight.tolist()


@pytest.mark.parametrize("name", EVERYBODY)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_outputs_that_are_not_finite_give_a_random_choice_and_are_reported(name, value):
    outputs = full_batch()["outputs"]
    outputs[3, 1] = value
    batch, selector, counts, draws = full_batch(outputs=outputs), EVERYBODY[name](), torch.zeros(20), 200
    for seed in range(draws):
        now = candidates(seed=seed, **batch)
        found = selector.select(now, 5)
        selector.learn(now, found.indices)
        assert len(found.indices.unique()) == 5
        counts[found.indices] += 1
        assert found.weights is None or (found.weights.isfinite().all() and (found.weights > 0).all())
    assert all(within(frequency, 0.25, draws) for frequency in (counts / draws).tolist())
    if isinstance(selector, SelectiveBackprop):
        assert history_of(selector).isnan().all()
    with pytest.raises(FloatingPointError, match=selector.name):
        selector.check()
    selector.check()  # said once
    selector.select(candidates(**full_batch()), 5)
    selector.check()


@pytest.mark.parametrize("name", [name for name in EVERYBODY if name != "rho"])  # which checks ids on the CPU at once
def test_no_step_waits_for_the_device(name):
    batch = full_batch()
    # Soft, because F.one_hot checks the values of what is on the CPU (not on CUDA).
    batch["targets"] = F.one_hot(batch["targets"], CLASSES).float()
    selector = EVERYBODY[name]()
    with NoWaiting():
        for step in range(3):
            now = candidates(seed=step, **batch)
            selector.learn(now, selector.select(now, 8).indices if step else None)
        for waits in (
            lambda: batch["outputs"][0, 0].item(),
            lambda: bool(batch["ids"].any()),
            batch["ids"].nonzero,
            lambda: batch["ids"][batch["ids"] > 0],
        ):
            with pytest.raises(AssertionError, match="waits"):
                waits()


def test_settings_that_make_no_sense_are_refused():
    for wrong in ({"beta": -1.0}, {"beta": math.nan}, {"history": 0}):
        with pytest.raises(ValueError, match="|".join(wrong)):
            SelectiveBackprop(**wrong)
    with pytest.raises(ValueError, match="uniform"):
        GradNorm(uniform=1.5)
    with pytest.raises(ValueError, match="least_confidence"):
        Uncertainty("doubt")  # type: ignore[arg-type]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 6, 3)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(F.relu(self.body(x)).mean((2, 3)))


@pytest.mark.parametrize("name", EVERYBODY)
def test_the_blocker_shows_them_what_they_need(name):
    torch.manual_seed(0)
    model, selector = Net(), EVERYBODY[name]()
    x, y, ids = torch.randn(20, 3, 6, 6), torch.randint(CLASSES, (20,)), torch.arange(20)
    with torch.no_grad():
        h = F.relu(model.body(x)).mean((2, 3))
        logits = model.head(h)
    blocker = ForwardBlocker(model, None, 0.5, selector=selector, schedule=Schedule(1, unit="step"), reuse="replay")
    for step in range(3):
        part, part_y = blocker(x, y, ids=ids)
        F.cross_entropy(model(part), part_y).backward()
        assert len(part) == (10 if step else 20)
        if step and name in DETERMINISTIC:
            expected = EVERYBODY[name]()
            expected.watches(model)
            expected = expected.select(candidates(logits, y, watched=h, ids=ids), 10)
            assert torch.equal(blocker.last.indices, expected.indices)
    if isinstance(selector, SelectiveBackprop):
        # Also the step that pruned nothing taught it.
        losses = F.cross_entropy(logits, y, reduction="none")
        assert torch.allclose(history_of(selector), losses.repeat(3)[-32:], atol=1e-6)
    state = blocker.state_dict()
    blocker.load_state_dict(state)
    assert blocker.stats.steps_replayed == 2
