"""Copies, learning rates, losses and batches of the short trainings."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfway
from halfway.advice.learner import Setup, called, factor_at, losses, moved, pair, peak_rate

from .invented import CPU, net, pairs


def setup(model: nn.Module, **more: Any) -> Setup:
    return Setup(model, **{"optimizer": None, "loss_fn": F.cross_entropy, "device": CPU, **more})


def test_a_learner_takes_the_steps_that_the_users_own_loop_would() -> None:
    model, batches = net(), pairs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for x, y in batches[:2]:  # momentum that has to be copied, too
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    learner = setup(model, optimizer=optimizer).learner()
    for x, y in batches[2:]:
        learner.step((x, y), 1.0)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine, theirs in zip(learner.model.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_copy_of_a_model_with_a_blocker_sees_whole_batches() -> None:
    model, (batch, *_) = net(), pairs()
    with halfway.ForwardBlocker(model, "0", 0.5):
        blocked = setup(model, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).learner()
        assert len(blocked.step(batch, 1.0)) == len(batch[1])
    plain = setup(model, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).learner()
    plain.step(batch, 1.0)
    for mine, theirs in zip(blocked.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


class Lookahead(torch.optim.SGD):
    """Keeps settings on itself, which a copy by PyTorch leaves out, and needs them in a step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.warm = lambda step: 1.0
        self.every, self.slow = 2, [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        self.every += int(self.warm(0))
        self.slow[0].add_(1)
        return super().step(closure)


def test_an_optimizer_is_copied_with_what_a_subclass_has_set_on_it() -> None:
    model = net()
    optimizer = Lookahead(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a step on the instance that must stay the old one's
    learner = Setup(model, optimizer, F.cross_entropy, CPU).learner()
    slow, weights = optimizer.slow[0].clone(), [p.clone() for p in model.parameters()]
    before = [p.detach().clone() for p in learner.model.parameters()]
    learner.step(pairs()[0], 1.0)
    assert learner.optimizer.every == 3  # type: ignore[attr-defined]
    assert optimizer.every == 2
    assert torch.equal(optimizer.slow[0], slow)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), weights, strict=True))
    assert not all(torch.equal(p, old) for p, old in zip(learner.model.parameters(), before, strict=True))


def test_samples_without_a_label_have_no_plain_loss() -> None:
    learner = Setup(net(), None, F.cross_entropy, CPU).learner()
    x, y = pairs()[0]
    y = torch.where(torch.arange(8) < 5, -100, y)
    for loss_fn in (F.cross_entropy, torch.nn.CrossEntropyLoss()):
        _, plain_B = losses(learner.model(x), y, loss_fn)
        assert plain_B.isnan().tolist() == [True] * 5 + [False] * 3


def test_the_loss_is_the_mean_over_labelled_samples_as_in_the_users_training() -> None:
    outputs, y = torch.randn(8, 3), torch.tensor([0, 1, -100, 2, -100, -100, 1, 0])
    loss, _ = losses(outputs, y, F.cross_entropy)
    torch.testing.assert_close(loss, F.cross_entropy(outputs, y))


def test_masks_without_a_labelled_pixel_have_no_plain_loss() -> None:
    outputs, y = torch.randn(4, 3, 5, 5), torch.randint(0, 3, (4, 5, 5))
    y[0], y[1], y[2, 0] = 255, -100, 255
    loss, plain_B = losses(outputs, y, F.cross_entropy)
    assert plain_B.isnan().tolist() == [True, True, False, False]
    torch.testing.assert_close(loss, plain_B[2:].mean())


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_a_loss_that_is_no_number_counts_as_infinite(kind: str) -> None:
    outputs = torch.tensor([[math.nan, 0.0], [1.0, 0.0]])
    if kind == "classes":
        _, plain_B = losses(outputs, torch.tensor([0, 0]), F.cross_entropy)
    else:
        _, plain_B = losses(outputs[:, 0], torch.zeros(2), lambda out, y: out - y)
    assert plain_B.isinf().tolist() == [True, False]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("loss", "copy of this Locked, .* loss_fn that is a function"),
        ("optimizer", "copy of this SGD, .* a function of"),
    ],
)
def test_what_cannot_be_copied_is_named(part: str, words: str) -> None:
    class Locked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if part == "optimizer":
        optimizer.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=words):
        Setup(model, optimizer, Locked() if part == "loss" else F.cross_entropy, CPU).learner()


def test_gradients_are_clipped_as_torch_does() -> None:
    model, (batch, *_) = net(), pairs()
    learner = setup(model, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), clip_norm=0.01).learner()
    learner.step(batch, 1.0)
    changes = [a - b for a, b in zip(learner.model.parameters(), model.parameters(), strict=True)]
    moved_by = sum(float(change.detach().square().sum()) for change in changes)
    assert math.sqrt(moved_by) == pytest.approx(0.01, rel=1e-3)


def test_mixed_precision_is_that_of_the_forward_pass() -> None:
    seen = []

    class Seeing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(super().forward(x).dtype)
            return super().forward(x)

    setup(Seeing(4, 3), autocast=torch.bfloat16).learner().step(pairs()[0], 1.0)
    assert set(seen) == {torch.bfloat16}


def test_a_frozen_part_of_a_model_that_trains_stays_frozen_and_a_model_in_eval_mode_trains() -> None:
    model = net()
    model[1].eval()
    assert not setup(model).learner().model[1].training  # type: ignore[index]
    assert setup(model.eval()).learner().model[1].training  # type: ignore[index]
    assert not model.training


def test_a_model_that_cannot_be_copied_is_an_error_that_says_what_to_do() -> None:
    model = net()
    model.kept = model(torch.randn(4, 4))  # type: ignore[assignment]
    with pytest.raises(ValueError, match="pass a newly built model"):
        setup(model).learner()


def test_the_rate_rises_falls_and_ends_at_zero() -> None:
    rates = [factor_at(i / 200) for i in range(201)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[20] == 1.0
    assert rates[:21] == sorted(rates[:21])
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[-1] == pytest.approx(0)
    assert factor_at(0.55) == pytest.approx(0.5)  # the middle of the cosine


def test_the_peak_is_found_where_a_scheduler_begins_below_it() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.3)
    assert peak_rate(optimizer.param_groups[0]) == 0.3
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.8, total_steps=10)
    assert optimizer.param_groups[0]["lr"] < 0.1
    assert peak_rate(optimizer.param_groups[0]) == 0.8


# ------------------------------------------------------------------------ losses

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.0, 5.0, 0.0]])
CLASSES = torch.tensor([0, 2])
PLAIN = [-math.log(math.exp(2) / (math.exp(2) + 1 + math.exp(-1))), -math.log(1 / (2 + math.exp(5)))]


def smoothed(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, label_smoothing=0.1)


def smoothed_each(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, label_smoothing=0.1, reduction="none")


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, smoothed, smoothed_each])
def test_losses_are_plain_whatever_is_trained_with(loss_fn: Any) -> None:
    loss, plain_B = losses(LOGITS, CLASSES, loss_fn)
    assert plain_B.tolist() == pytest.approx(PLAIN)
    assert float(loss) == pytest.approx(float(loss_fn(LOGITS, CLASSES).mean()))


def test_targets_that_are_no_classes_need_one_loss_per_sample() -> None:
    y = torch.tensor([1.0, 2.0])

    def squared(outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs[:, 0] - y) ** 2

    loss, plain_B = losses(LOGITS, y, squared)
    assert plain_B.tolist() == [1.0, 4.0]
    assert float(loss) == 2.5
    with pytest.raises(ValueError, match=r"targets are no classes but float32 of shape \(2,\); pass loss_fn="):
        losses(LOGITS, y, F.cross_entropy)
    with pytest.raises(ValueError, match="let it return one loss per sample"):
        losses(LOGITS, y, lambda outputs, y: squared(outputs, y).mean())
    with pytest.raises(ValueError, match=r"got float32 of shape \(2, 3\)"):
        losses(LOGITS, y, lambda outputs, y: outputs)


def test_a_single_logit_for_two_classes_is_judged_by_the_given_loss() -> None:
    def binary(outputs: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs[:, 0], y.float(), reduction="none")

    _, plain_B = losses(torch.tensor([[0.0], [3.0]]), torch.tensor([1, 1]), binary)
    assert plain_B.tolist() == pytest.approx([math.log(2), math.log(1 + math.exp(-3))])


# ----------------------------------------------------------------------- batches


def test_inputs_go_to_the_model_by_position_or_by_name() -> None:
    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + 10 * b

    a, b = torch.ones(2), torch.full((2,), 2.0)
    for x in ((a, b), [a, b], {"b": b, "a": a}):
        assert called(Sum(), x).tolist() == [21, 21]


def test_a_batch_is_a_pair_and_what_follows_is_left_out() -> None:
    x, y = pairs(1)[0]
    assert pair([x, y, torch.arange(8)], CPU)[1] is y
    for wrong in (x, (x,), {"x": x}, "text"):
        with pytest.raises(TypeError, match=r"pairs \(input, targets\) are needed; pass a loader"):
            pair(wrong, CPU)
    nested = moved({"a": [x, "name"]}, torch.device("meta"))
    assert nested["a"][0].device.type == "meta"
    assert nested["a"][1] == "name"
