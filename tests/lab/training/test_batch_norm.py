"""BatchNorm's statistics of an evaluation: the plain mean over some batches, and no trace of it afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from halfway.lab.training.batch_norm import estimated


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 5)
    )
    model.append(nn.BatchNorm1d(5, momentum=0.3))
    for _ in range(3):  # statistics that are worth keeping
        model.train()(2 + torch.randn(8, 3, 8, 8))
    return model


def batches(sizes: tuple[int, ...] = (8, 8, 5)) -> list[Tensor]:
    torch.manual_seed(1)
    return [3 * torch.randn(n, 3, 8, 8) - 1 for n in sizes]


def states(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_the_statistics_are_the_means_over_the_batches() -> None:
    model = network()
    convolution, second = copy.deepcopy(model[0]).double(), copy.deepcopy(model).double()
    inputs = [convolution(x.double()) for x in batches()]
    # Unbiased, as BatchNorm keeps them; each batch counts equally, also the smaller one.
    mean = torch.stack([h.mean((0, 2, 3)) for h in inputs]).mean(0)
    variance = torch.stack([h.transpose(0, 1).flatten(1).var(1) for h in inputs]).mean(0)
    deep = []
    for h in inputs:  # without dropout: what comes before the second layer uses each batch's own statistics
        spread = h.var((0, 2, 3), unbiased=False, keepdim=True)
        normal = (h - h.mean((0, 2, 3), keepdim=True)) / (spread + model[1].eps).sqrt()
        scaled = normal * second[1].weight.view(1, -1, 1, 1) + second[1].bias.view(1, -1, 1, 1)
        deep.append(second[5](scaled.relu().flatten(1)))
    with estimated(model, batches()):
        assert not model.training
        assert not any(module.training for module in model.modules())
        torch.testing.assert_close(model[1].running_mean.double(), mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model[1].running_var.double(), variance, rtol=1e-4, atol=1e-5)
        means, variances = (
            torch.stack([f(h) for h in deep]).mean(0) for f in (lambda h: h.mean(0), lambda h: h.var(0))
        )
        torch.testing.assert_close(model[6].running_mean.double(), means, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(model[6].running_var.double(), variances, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fails", ["nothing", "the body", "a batch"])
def test_everything_comes_back_bit_for_bit(training: bool, fails: str) -> None:
    model = network().train(training)
    before, given = states(model), batches()
    if fails == "a batch":
        given.append(torch.zeros(2, 7))
    try:
        with estimated(model, given):
            assert not same(states(model), before)
            if fails == "the body":
                raise KeyboardInterrupt
    except (KeyboardInterrupt, RuntimeError):
        assert fails != "nothing"
    assert same(states(model), before)
    assert [model[1].momentum, model[6].momentum] == [0.1, 0.3]
    assert all(module.training is training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_dropout_draws_nothing() -> None:
    model, given = network(), batches()
    before = torch.get_rng_state()
    with estimated(model, given):
        pass
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_without_batch_norm_sees_no_batch() -> None:
    def none() -> Iterator[Tensor]:
        raise AssertionError("nothing needs to be read")
        yield

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    with estimated(model, none()):
        assert model.training
