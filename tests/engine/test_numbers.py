"""Numbers that follow the number of samples: no tensor shows them, and a shorter batch has others.

A factor of 1 / len(x), a limit, a probability. Every step has the gradients of a plain copy on the retained samples,
also when the number begins to follow the batch after the program was proven.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.apart import Net, normal_batches, train

# `n` is the length of the batch, or a constant as long as the number does not follow it.
USES = {
    "a factor": lambda h, n: h * (4 / n),
    "a whole number": lambda h, n: 0.05 * h * n,
    "a divisor": lambda h, n: h / n,
    "a power": lambda h, n: h.abs() ** (8 / n),
    "added": lambda h, n: h + n / 8,
    "added with alpha": lambda h, n: torch.add(h, 0.1 * h.sin(), alpha=n),
    "subtracted from": lambda h, n: n / 8 - h,
    "a limit": lambda h, n: h.clamp(max=n / 16),
    "a limit that is not reached": lambda h, n: h.clamp(max=float(n)) * 1.5,
    "a slope": lambda h, n: F.leaky_relu(h, 1 / n),
    "a threshold": lambda h, n: F.threshold(h, n / 32, 0.0),
    "filled in": lambda h, n: h.masked_fill(h > 0, 1 / n),
    "in place": lambda h, n: h.clone().mul_(4 / n),
    "addcmul": lambda h, n: torch.addcmul(h, h, h, value=4 / n),
    "lerp": lambda h, n: torch.lerp(h, h.cos(), 1 / n),
    "eps": lambda h, n: F.layer_norm(h, h.shape[1:], eps=1 / n),
    "a tensor": lambda h, n: h * torch.tensor(4 / n),
    "a list": lambda h, n: h + torch.tensor([0.0, 4 / n]).repeat(8),
    "full": lambda h, n: h * torch.full((1,), 4 / n),
    "full_like": lambda h, n: h * torch.full_like(h[:1], 4 / n),
    "new_full": lambda h, n: h * h.new_full((16,), 4 / n),
    "fill_": lambda h, n: h * torch.empty(16).fill_(4 / n),
    "linspace": lambda h, n: h * torch.linspace(0, n, 16),
    "a count": lambda h, n: h * torch.ones(n).sum().rsqrt(),
    "a mean of zeros and ones": lambda h, n: h * torch.cat([torch.ones(4), torch.zeros(n)]).mean(),
    "a length in a product": lambda h, n: h * (torch.ones(1, n) @ torch.ones(n, 1)).rsqrt(),
    "a shift": lambda h, n: h.roll(n % 7, 1),
    "a place": lambda h, n: h * h.detach().narrow(1, n % 5, 1),
    "a diagonal": lambda h, n: (h.view(-1, 4, 4) * torch.ones(4, 4).tril(n % 3)).flatten(1),
}


class Follows(nn.Module):
    """Uses the length of the batch, from its `since`-th call on."""

    def __init__(self, use, since):
        super().__init__()
        self.use, self.since, self.calls = use, since, 0

    def forward(self, h):
        self.calls += 1
        return self.use(h, len(h) if self.calls > self.since else 12)


@pytest.mark.parametrize("since", [0, 3])
@pytest.mark.parametrize("use", USES)
def test_a_number_that_follows_the_batch(use: str, since: int) -> None:
    torch.manual_seed(0)
    outcome = train(Net(Follows(USES[use], since)), normal_batches(6, 12, 16)).assert_right(use)
    if since:  # each step counts calls of its own, so the first three are the same for all and for some samples
        assert all(outcome.replayed[:since])


@pytest.mark.parametrize("p", [lambda n: 1 / n, lambda n: 0.5 if n > 8 else 0.2])
def test_a_probability_that_follows_the_batch(p) -> None:
    torch.manual_seed(0)
    train(Net(lambda h: F.dropout(h, p(len(h)))), normal_batches(6, 32, 16), draws=True).assert_right()


DRAWS = {
    "partners": lambda h: h + h[torch.randint(len(h), (len(h),))],
    "partners, by low and high": lambda h: h + h[torch.randint(0, len(h), (len(h),))],
    "partners, by index_select": lambda h: h + h.index_select(0, torch.randint(len(h), (len(h),))),
    "partners, by multinomial": lambda h: h + h[torch.multinomial(torch.ones(len(h)), len(h))],
    "numbers": lambda h: h * torch.randint(len(h), (len(h), 1)),
    "one number": lambda h: h * torch.randint(len(h), (1,)),
    "numbers like": lambda h: h * torch.randint_like(h, len(h)),
    "numbers in place": lambda h: h * torch.empty_like(h).random_(len(h)),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_as_large_as_the_batch(draw: str) -> None:
    """Drawn for all samples they would point to samples that have left."""
    torch.manual_seed(0)
    train(Net(DRAWS[draw]), normal_batches(6, 32, 16), draws=True).assert_right()


MIXED = {
    "mean": lambda h: h - h.mean(0),
    "neighbour": lambda h: h - h.roll(1, 0),
    "order": lambda h: h.flip(0).clone(),
    "product": lambda h: h @ (h.T @ h) / 100,
    "sorted": lambda h: h.sort(0).values,
}


@pytest.mark.parametrize("draw", [F.rrelu, F.rrelu_, nn.RReLU(0.1, 0.6), nn.RReLU(0.1, 0.6, inplace=True)])
@pytest.mark.parametrize("mixed", MIXED)
def test_a_draw_that_computes_with_what_it_overwrites(mixed: str, draw) -> None:
    """Its output cannot be computed again to see whether it depends on other samples: it must be known of its input."""
    torch.manual_seed(0)

    def between(h):
        h = MIXED[mixed](h)
        if isinstance(draw, nn.Module):
            return draw(h)
        return draw(h, 0.1, 0.6, training=True)

    train(Net(between), normal_batches(4, 32, 16), draws=True).assert_right()


@pytest.mark.parametrize("solve", [torch.linalg.cholesky, torch.linalg.inv], ids=["cholesky", "inv"])
def test_a_model_that_fails_on_copies_of_samples_is_computed(solve) -> None:
    """The swap overwrites samples with others, and a matrix of their products becomes singular. Plain training on the
    retained samples does not fail, so neither may this."""
    torch.manual_seed(0)
    outcome = train(Net(lambda h: solve(h @ h.T) @ h), normal_batches(3, 12, 16)).assert_right()
    assert "LinAlgError" in next(iter(outcome.stats.recompute_reasons))


class Anneals(nn.Module):
    """Another number in every step, the same one for every sample."""

    def __init__(self, use, number):
        super().__init__()
        self.use, self.number, self.calls = use, number, 0

    def forward(self, h):
        self.calls += 1
        return self.use(h, self.number(self.calls))


@pytest.mark.parametrize("use", USES)
def test_a_number_that_changes_from_step_to_step_is_replayed(use: str) -> None:
    torch.manual_seed(0)
    net = Net(Anneals(USES[use], lambda step: 10 + step))
    train(net, normal_batches(6, 12, 16)).assert_right(use).assert_all_replayed()


def test_nan_is_the_same_number() -> None:
    net = Net(lambda h: torch.nan_to_num(h.masked_fill(h > 5, float("nan")), nan=math.nan))
    train(net, normal_batches(4, 12, 16)).assert_right().assert_all_replayed()
