"""Optimizers and learning rates of the recipes, step by step against closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

pytest.importorskip("yaml")

from halfway.lab.recipes.reading import load
from halfway.lab.recipes.schema import LearningRate, OptimizerSettings
from halfway.lab.training.optim import make_optimizer, make_policy

STEPS = 40
PEAK = 0.8


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def optimizer(name: Any = "sgd", lr: float = PEAK, decay: float = 0.01, **options: Any) -> Optimizer:
    return make_optimizer(OptimizerSettings(name, lr, decay, options), net())


def rates(settings: LearningRate, steps: int = STEPS, warmup: int = 0, name: str = "sgd") -> list[float]:
    """The learning rate of each training step, and the one that is left after the last."""
    opt = optimizer(name, momentum=0.9) if name != "adamw" else optimizer(name)
    policy = make_policy(settings, opt, PEAK, steps, warmup)
    seen = []
    for _ in range(steps):
        (lr,) = {group["lr"] for group in opt.param_groups}
        seen.append(float(lr))
        opt.step()
        policy.step()
    return [*seen, float(opt.param_groups[0]["lr"])]


def one_cycle(step: int, steps: int, rise: float) -> float:
    """Half a cosine from peak / 25 up to the peak at step `rise - 1`, then one down to a 10,000th of the start."""
    first, last = PEAK / 25, PEAK / 25 / 1e4

    def along(start: float, end: float, share: float) -> float:
        return end + (start - end) * (1 + math.cos(math.pi * share)) / 2

    top = rise - 1
    return along(first, PEAK, step / top) if step <= top else along(PEAK, last, (step - top) / (steps - 1 - top))


# ------------------------------------------------------------- learning rates


@pytest.mark.parametrize("warmup", [2, 5, 20, 39])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_one_cycle_rises_for_the_warm_up_and_peaks_at_its_end(warmup: int, name: str) -> None:
    seen = rates(LearningRate("onecycle", warmup=1.0), warmup=warmup, name=name)[:-1]
    assert seen == pytest.approx([one_cycle(step, STEPS, warmup) for step in range(STEPS)])
    assert seen.index(max(seen)) == warmup - 1
    assert max(seen) == pytest.approx(PEAK)


def test_one_cycle_without_a_warm_up_of_its_own_rises_for_30_percent() -> None:
    seen = rates(LearningRate("onecycle"), warmup=0)[:-1]
    assert seen == pytest.approx([one_cycle(step, STEPS, 0.3 * STEPS) for step in range(STEPS)])
    assert seen[0] == pytest.approx(PEAK / 25)
    assert seen[-1] == pytest.approx(PEAK / 25 / 1e4)


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("warmup", [0, 1, 2, 6, 7, 100])
def test_one_cycle_takes_any_warm_up(steps: int, warmup: int) -> None:
    seen = rates(LearningRate("onecycle", warmup=1.0), steps, warmup)[:-1]
    assert all(0 < lr <= PEAK * (1 + 1e-9) for lr in seen)
    if steps == 7 and warmup < 7:
        assert seen.index(max(seen)) == max(1, warmup - 1)
        assert max(seen) > 0.9 * PEAK


@pytest.mark.parametrize("warmup", [0, 1, 8, STEPS])
@pytest.mark.parametrize("final", [0.0, 0.05])
def test_cosine_rises_in_a_line_and_falls_by_half_a_cosine(warmup: int, final: float) -> None:
    seen = rates(LearningRate("cosine", warmup=1.0, final=final), warmup=warmup, name="adamw")
    for step in range(warmup):
        assert seen[step] == pytest.approx(PEAK * (step + 1) / warmup)
    for step in range(warmup, STEPS):
        share = (step - warmup) / (STEPS - warmup)
        assert seen[step] == pytest.approx(final + (PEAK - final) * 0.5 * (1 + math.cos(math.pi * share)))
    assert max(seen) == pytest.approx(PEAK)
    if warmup < STEPS:
        assert seen[STEPS] == pytest.approx(final)
        halfway = warmup + (STEPS - warmup) // 2
        assert seen[halfway] == pytest.approx((PEAK + final) / 2, rel=0.1)


@pytest.mark.parametrize("warmup", [0, 8])
@pytest.mark.parametrize(("power", "final"), [(0.9, 0.0), (0.9, 0.01), (2.0, 0.1)])
def test_poly_falls_by_a_power(power: float, final: float, warmup: int) -> None:
    seen = rates(LearningRate("poly", warmup=1.0, final=final, power=power), warmup=warmup)
    for step in range(warmup):
        assert seen[step] == pytest.approx(PEAK * (step + 1) / warmup)
    for step in range(warmup, STEPS):
        left = (STEPS - step) / (STEPS - warmup)
        assert seen[step] == pytest.approx(final + (PEAK - final) * left**power)
    assert seen[STEPS] == pytest.approx(final)


def test_policies_go_on_where_they_were() -> None:
    for settings in (LearningRate("onecycle"), LearningRate("cosine", final=0.1), LearningRate("poly")):
        whole = rates(settings, warmup=4)
        opt = optimizer(momentum=0.9)
        policy = make_policy(settings, opt, PEAK, STEPS, 4)
        for _ in range(15):
            opt.step()
            policy.step()
        saved = (opt.state_dict(), policy.state_dict())
        opt = optimizer(momentum=0.9)
        policy = make_policy(settings, opt, PEAK, STEPS, 4)
        opt.load_state_dict(saved[0])
        policy.load_state_dict(saved[1])
        rest = []
        for _ in range(15, STEPS):
            rest.append(float(opt.param_groups[0]["lr"]))
            opt.step()
            policy.step()
        assert rest == whole[15:STEPS]


# ----------------------------------------------------------------- optimizers


def test_sgd_decays_everything() -> None:
    opt = optimizer("sgd", momentum=0.9, nesterov=True)
    assert type(opt) is torch.optim.SGD
    (group,) = opt.param_groups
    assert (group["lr"], group["weight_decay"], group["momentum"], group["nesterov"]) == (PEAK, 0.01, 0.9, True)
    assert len(group["params"]) == len(list(net().parameters()))


@pytest.mark.parametrize("name", ["adamw", "lars"])
def test_biases_and_normalisation_are_not_decayed_by_adamw_and_lars(name: str) -> None:
    if name == "lars":
        pytest.importorskip("timm")
    opt = optimizer(name)
    decayed, spared = opt.param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(4, 3, 3, 3), (2, 4)]
    assert [tuple(p.shape) for p in spared["params"]] == [(4,), (4,), (4,), (2,)]
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.01, 0.0)
    assert {group["lr"] for group in opt.param_groups} == {PEAK}


def test_adamw_shrinks_weights_without_a_gradient_and_leaves_biases() -> None:
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    opt = make_optimizer(OptimizerSettings("adamw", 0.5, 0.1), model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    for p, was in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), was * (1 - 0.5 * 0.1) if p.ndim > 1 else was)


def test_lars_is_timm_s_and_the_learning_rate_reaches_its_step() -> None:
    pytest.importorskip("timm")
    from timm.optim.lars import Lars

    assert type(optimizer("lars")) is Lars
    recipe = load("imagenet-resnet50")
    model = net()
    opt = make_optimizer(recipe.optimizer, model)
    policy = make_policy(recipe.learning_rate, opt, recipe.optimizer.lr, steps=90, warmup=5)
    for step in range(6):
        weight, bias = model[0].weight, model[0].bias
        was, bias_was = weight.detach().clone(), bias.detach().clone()
        gradients = [torch.randn_like(p) for p in model.parameters()]
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient.clone()
        for group in opt.param_groups:
            group["momentum"] = 0.0
        lr = float(opt.param_groups[0]["lr"])
        opt.step()
        policy.step()
        # You et al., Eq. 6: a step of the weights' norm, times the trust coefficient 0.001, along the decayed gradient.
        decay = recipe.optimizer.weight_decay
        trust = 0.001 * was.norm() / (gradients[0].norm() + decay * was.norm())
        torch.testing.assert_close(weight.detach(), was - lr * trust * (gradients[0] + decay * was))
        torch.testing.assert_close(bias.detach(), bias_was - lr * gradients[1], msg="biases take plain steps")
        if step == 4:
            assert lr == pytest.approx(6.4), "the paper's peak, after 5 of 90"
