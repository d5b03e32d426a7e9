"""Samples that do not lie side by side: frames of a video, several views, tokens, in front of or behind the batch.

Where an operation's samples lie is learned once. Values that are not floating point (the indices of max pooling,
integers, complex numbers) and random draws are easily cut in another way than the outputs beside them. Every step here
has the gradients of a plain copy.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.apart import normal_batches, train


def time_major(x, function):
    """(B, T, ...) as (T B, ...) and back."""
    return function(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1)


def sample_major(x, function):
    """(B, T, ...) as (B T, ...) and back."""
    return function(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def views(x, function):
    """Views side by side, as contrastive learning has them: each holds the whole batch."""
    return torch.stack(function(torch.cat(x.unbind(1))).chunk(x.shape[1]), 1)


def in_the_middle(x, function):
    """(B, T, ...) with T = 2 T', as (2 B T', ...): something before the batch and something behind it."""
    halves = x.unflatten(1, (2, -1)).transpose(0, 1)
    return function(halves.flatten(0, 2)).unflatten(0, halves.shape[:3]).transpose(0, 1).flatten(1, 2)


LAYOUTS = {f.__name__: f for f in (sample_major, time_major, views, in_the_middle)}


def pooled(kernel, dimensions):
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dimensions - 1]
    return lambda x: pool(x, kernel)


def unpooled(dimensions):
    """With indices that the program itself uses."""
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dimensions - 1]
    unpool = (F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)[dimensions - 1]

    def run(x):
        values, indices = pool(x, 2, return_indices=True)
        return unpool(values, indices, 2, output_size=x.shape) + x

    return run


POOLING = {
    "1d": (1, pooled(2, 1)),
    "2d": (2, pooled(2, 2)),
    "3d": (3, pooled(2, 3)),
    "1d with indices": (1, unpooled(1)),
    "2d with indices": (2, unpooled(2)),
    "3d with indices": (3, unpooled(3)),
    "2d, adaptive": (2, lambda x: F.adaptive_max_pool2d(x, 3)),
    "2d, of ties": (2, lambda x: F.max_pool2d(x.relu(), 3, 1, 1)),
}


class Pooled(nn.Module):
    """A convolution, `pool` and another convolution in a layout; the cut is outside of it."""

    def __init__(self, layout, dimensions, pool):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
        self.first, self.second = conv(2, 4, 3, padding=1), conv(4, 4, 1)
        self.layout, self.pool, self.dimensions = layout, pool, dimensions
        self.cut, self.head = nn.Identity(), nn.Linear(4, 3)

    def forward(self, x):
        spatial = tuple(range(2, 2 + self.dimensions))
        h = self.layout(x, lambda frames: self.second(self.pool(self.first(frames))).square().mean(spatial))
        return self.head(self.cut(h).mean(1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", POOLING)
def test_max_pooling_sends_gradients_where_they_belong(layout, name):
    dimensions, pool = POOLING[name]
    model = Pooled(LAYOUTS[layout], dimensions, pool)
    outcome = train(model, normal_batches(6, 8, 4, 2, *[6] * dimensions)).assert_right()
    if layout != "in_the_middle":
        outcome.assert_all_replayed()
        assert outcome.stats.operations_replayed >= 2 * 6


def test_a_video_in_time_major_order_trains_for_long():
    model = Pooled(time_major, 2, pooled(2, 2))
    outcome = train(model, normal_batches(34, 8, 3, 2, 8, 8)).assert_right().assert_all_replayed()
    assert outcome.stats.operations_replayed >= 2 * 34


@pytest.mark.parametrize("size", [2, 3, 5, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_many_frames_as_samples_are_not_mistaken_for_them(layout, size):
    frames = size + size % 2 if layout == "in_the_middle" else size
    train(Pooled(LAYOUTS[layout], 2, pooled(2, 2)), normal_batches(4, size, frames, 2, 6, 6)).assert_right()


def test_max_pooling_with_the_samples_as_channels_is_right():
    """(1, B, T): pooled over time, with the batch where channels are."""

    class Channels(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.cut, self.head = nn.Linear(8, 12), nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.cut(self.b(F.max_pool1d(self.a(x)[None], 2)[0])))

    train(Channels(), normal_batches(6, 8, 8)).assert_right()


# --- complex numbers and integers ------------------------------------------------------------------------------------


class Spectral(nn.Module):
    """A Fourier layer: complex products in a layout."""

    def __init__(self, layout, kind):
        super().__init__()
        self.layout, self.kind = layout, kind
        self.a, self.cut, self.head = nn.Linear(6, 8), nn.Identity(), nn.Linear(8, 3)
        self.weight = nn.Parameter(
            torch.randn(5 if kind == "fft" else 4, 5 if kind == "fft" else 4, dtype=torch.cfloat)
        )

    def mix(self, h):
        if self.kind == "fft":
            return torch.fft.irfft(torch.fft.rfft(h) @ self.weight, n=8)
        if self.kind == "bmm":
            z = torch.view_as_complex(h.view(-1, 1, 4, 2))
            return torch.view_as_real(torch.bmm(z, self.weight.expand(len(z), 4, 4))).flatten(1)
        return torch.view_as_real(torch.view_as_complex(h.view(-1, 4, 2)) @ self.weight).flatten(1)

    def forward(self, x):
        return self.head(self.cut(self.layout(self.a(x), self.mix)).mean(1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["fft", "bmm", "mm"])
def test_complex_outputs_are_cut_like_all_others(layout, kind):
    train(Spectral(LAYOUTS[layout], kind), normal_batches(18, 8, 4, 6)).assert_right()


class Counting(nn.Module):
    """Integer products in a layout; what they give scales the features."""

    def __init__(self, layout, batched):
        super().__init__()
        self.layout, self.batched = layout, batched
        self.a, self.b, self.cut, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 3)
        self.register_buffer("table", torch.arange(64).view(8, 8) % 5)

    def scaled(self, h):
        signs = (h > 0).long()
        if self.batched:
            return h * (1 + torch.bmm(signs.view(-1, 1, 8), self.table.expand(len(h), 8, 8)).view_as(h))
        return h * (1 + signs @ self.table)

    def forward(self, x):
        return self.head(self.cut(self.b(self.layout(self.a(x), self.scaled))).mean(1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batched", [False, True])
def test_integer_outputs_are_cut_like_all_others(layout, batched):
    train(Counting(LAYOUTS[layout], batched), normal_batches(18, 8, 4, 6)).assert_right()


# --- random draws ----------------------------------------------------------------------------------------------------


class Drawn(nn.Module):
    """A draw in a layout, between two layers."""

    def __init__(self, layout, draw):
        super().__init__()
        self.layout, self.draw = layout, draw
        self.a, self.b, self.cut, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.cut(self.b(self.layout(self.a(x), self.draw))).mean(1))


DRAWS = {
    "hardly any dropout": lambda h: F.dropout(h, 0.02),
    "hardly any drop path": lambda h: h * torch.bernoulli(torch.full((len(h), 1), 0.95)),
    "dropout": lambda h: F.dropout(h, 0.5),
    "drop path": lambda h: h * h.new_empty(len(h), 1).bernoulli_(0.7).div_(0.7),
    "little noise": lambda h: h + 5e-5 * torch.randn_like(h),
    "noise": lambda h: h + torch.randn(h.shape),
    "integers": lambda h: h * torch.randint(1, 4, (len(h), 1)),
    "rrelu": lambda h: F.rrelu(h, training=True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("size", [8, 32])
def test_draws_stay_with_their_samples(layout, name, size):
    for seed in range(3):
        torch.manual_seed(seed)
        model = Drawn(LAYOUTS[layout], DRAWS[name])
        train(model, normal_batches(6, size, 4, 6, seed=seed), draws=True).assert_right(name)


def test_draws_for_samples_side_by_side_are_replayed():
    for name, draw in DRAWS.items():
        outcome = train(Drawn(sample_major, draw), normal_batches(3, 32, 4, 6), draws=True)
        outcome.assert_right(name).assert_all_replayed()
