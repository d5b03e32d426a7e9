"""Samples that begin to see each other later, without a new operation: no look at the first batch can show it.

A gate that opens as it is trained, a dimension or an order that another step brings, an outlier that a single operation
answers for the whole batch. Every step has the gradients of a plain copy on the retained samples.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import library, nn

from tests.helpers.apart import Net, normal_batches, train

# --- a gate that is closed at first ----------------------------------------------------------------------------------


def wrong_windows(h):
    """Windows of one sample meet those of another: repeated where they should be interleaved."""
    return (h.view(-1, 4) * h[:, :4].repeat(4, 1)).view_as(h)


def other_order(h):
    return h[torch.arange(len(h) - 1, -1, -1)]


def scattered(h):
    return torch.zeros_like(h).index_add(0, torch.arange(len(h)) // 2, h)


def gathered(h):
    return h.gather(0, torch.arange(len(h)).roll(1).view(-1, 1).expand_as(h))


def wrong_transpose(h):
    """Reshaped where it should be transposed."""
    return h.T.reshape(h.shape)


def as_strided(h):
    return h.contiguous().as_strided(h.shape, (1, len(h)))


def neighbours(h):
    return h.view(-1, 2, h.shape[1]).flip(1).view_as(h)


def taken(h):
    return h.take(torch.arange(h.numel() - 1, -1, -1)).view_as(h)


MIXING = {
    "rolled": lambda h: h.roll(1, 0),
    "rolled, flat": lambda h: h.roll(1),
    "flipped": lambda h: h.flip(0),
    "wrong windows": wrong_windows,
    "another order": other_order,
    "scattered": scattered,
    "gathered": gathered,
    "wrongly transposed": wrong_transpose,
    "wrong strides": as_strided,
    "neighbours": neighbours,
    "taken by place": taken,
    "one that is sorted": lambda h: h.sort(0).values,
    "attention": lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
    "product": lambda h: torch.ones(len(h), len(h)).tril() @ h / len(h),
    "mean": lambda h: h.mean(0, keepdim=True).expand_as(h),
    "numbers": lambda h: h * torch.arange(float(len(h))).view(-1, 1),
    "alternating": lambda h: h * (torch.arange(len(h)) % 2).view(-1, 1),
}


class Gated(nn.Module):
    """A branch that mixes samples, behind a gate that training opens."""

    def __init__(self, branch, kind):
        super().__init__()
        self.branch, self.kind = branch, kind
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, h):
        mixed = self.branch(h)
        if self.kind == "added":
            return h + self.gate * mixed
        if self.kind == "chosen":
            return torch.where(self.gate.abs() > 0.01, mixed, h)
        return torch.lerp(h, mixed, self.gate)


def train_with_a_gate(model, batches, opened_at, **kwargs):
    """The gate opens by itself, or by hand before this batch."""

    def opening():
        for step, x in enumerate(batches):
            if step == opened_at:
                with torch.no_grad():
                    model.between.gate.fill_(0.5)
            yield x

    return train(model, opening(), rate=0.0, **kwargs)


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("kind", ["added", "chosen", "lerp"])
def test_a_gate_that_opens_later_is_right(name, kind):
    model = Net(Gated(MIXING[name], kind))
    train_with_a_gate(model, normal_batches(8, 8, 16), opened_at=3).assert_right(name)


@pytest.mark.parametrize("name", ["wrong windows", "another order", "wrongly transposed", "rolled"])
def test_a_gate_that_training_opens_is_right(name):
    """From zero on, by its own gradient."""
    train(Net(Gated(MIXING[name], "added")), normal_batches(20, 8, 16), rate=0.2).assert_right(name)


# --- arguments that another step brings ------------------------------------------------------------------------------


class Changing(nn.Module):
    """The same operations in every step, but along another dimension, or by another constant, from the third on."""

    def __init__(self, run):
        super().__init__()
        self.register_buffer("step", torch.zeros(1))
        self.late, self.run = False, run

    def forward(self, h):
        return self.run(h, self.late)


def order(n, late):
    return torch.tensor([*range(n)][:: -1 if late else 1])


ARGUMENTS = {
    "cumsum": lambda h, late: h.cumsum(0 if late else 1) * 0.1 + h,
    "softmax": lambda h, late: h.softmax(0 if late else 1) + h,
    "flip": lambda h, late: h.flip(0 if late else 1) + h,
    "roll": lambda h, late: h.roll(1, 0 if late else 1) + h,
    "sort": lambda h, late: h.sort(0 if late else 1).values + h,
    "cummax": lambda h, late: h.cummax(0 if late else 1).values + h,
    "logcumsumexp": lambda h, late: h.logcumsumexp(0 if late else 1) + h,
    "gather": lambda h, late: h.gather(0 if late else 1, torch.zeros(len(h), 16, dtype=torch.int64)) + h,
    "renorm": lambda h, late: h.renorm(2, 1 if late else 0, 0.5),
    "square attention": lambda h, late: (h @ h.T if late else h @ h.new_ones(16, len(h))).softmax(1) @ h,
    "an order in a list": lambda h, late: h[order(len(h), late)] + h,
    "a matrix": lambda h, late: torch.eye(len(h))[order(len(h), late)] @ h + h,
    "a matrix of numbers": lambda h, late: (
        torch.tensor([[float(i == j or late) for i in range(len(h))] for j in range(len(h))]) @ h
    ),
    "weights of the samples": lambda h, late: h * torch.tensor([1.0 + i * late for i in range(len(h))]).view(-1, 1),
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("size", [8, 16])
def test_an_argument_that_changes_later_is_right(name, size):
    """With as many samples as features, shapes tell nothing either."""
    model = Net(Changing(ARGUMENTS[name]))

    def changing():
        for step, x in enumerate(normal_batches(8, size, 16)):
            model.between.late = step >= 3
            yield x

    train(model, changing(), rate=0).assert_right(name)


# --- outliers within one operation -----------------------------------------------------------------------------------


@library.custom_op("halfway_tests::stop_all", mutates_args=())
def stop_all(h: torch.Tensor) -> torch.Tensor:
    """An operation of somebody else's, in which one sample stops all of them."""
    return h * 0.01 if h.abs().amax() > 100 else h * 2.0


@stop_all.register_fake
def _(h):
    return torch.empty_like(h)


stop_all.register_autograd(
    lambda context, grad: grad * context.scale,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "scale", 0.01 if inputs[0].abs().amax() > 100 else 2.0),
)


class Clipped(torch.autograd.Function):
    """The same as a function of autograd."""

    @staticmethod
    def forward(ctx, h):
        ctx.scale = torch.where(h.abs().amax() > 100, 0.01, 2.0)
        return h * ctx.scale

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale


def by_rank(h):
    """Outliers come last; the order is that of the batch as long as there are none."""
    return h[(h.detach().norm(dim=1) > 100).int().argsort(stable=True)]


def filled_in(h):
    """Values are handed out in order, to whoever has a place for them."""
    return h.masked_scatter(h.detach().abs() > 1000, h.detach().clamp(-1, 1) * 0.5)


OUTLIERS = {
    "renorm over the batch": lambda h: h.renorm(2, 1, 1000.0),
    "renorm in place": lambda h: (h * 1.0).renorm_(2, 1, 1000.0),
    "a custom operation": lambda h: stop_all(h),  # an operation itself cannot be copied with the model
    "a function of autograd": Clipped.apply,
    "ranked": by_rank,
    "masked_scatter": filled_in,
    "clip_grad_norm of features": lambda h: h * (1000 / (torch.linalg.vector_norm(h.detach()) + 1e-6)).clamp(max=1),
    "foreach norm": lambda h: h * (1000 / (torch._foreach_norm([h.detach()])[0] + 1e-6)).clamp(max=1),
    "cumulative product": lambda h: h * (h.detach().abs().amax(1, keepdim=True) < 100).float().cumprod(0),
    "cumulative, flat": lambda h: h * (h.detach().abs() < 100).float().flatten().cumprod(0).view_as(h),
    "max pooling over the batch": lambda h: (
        h * (F.max_pool1d(h.detach().abs().amax(1).view(1, 1, -1), 3, 1, 1).view(-1, 1) < 100)
    ),
    "searchsorted": lambda h: (
        h * (1 + torch.searchsorted(h.detach()[:, 0].sort().values, torch.tensor([1000.0])) / len(h))
    ),
}


@pytest.mark.parametrize("name", OUTLIERS)
@pytest.mark.parametrize("outlier_is_retained", [False, True])
def test_an_outlier_that_one_operation_answers_is_right(name, outlier_is_retained):
    batches = normal_batches(8, 8, 16)
    scores = torch.arange(8.0)
    scores[2] = 100.0 if outlier_is_retained else -1.0
    for x in batches[4:]:
        x[2] *= 1e4
    train(Net(OUTLIERS[name]), batches, scores=[scores] * 8, rate=0).assert_right(name)
