"""A model that swallows every exception cannot make a replay go on that has gone wrong, nor a probe run past its end.

Bare `except:` clauses and context managers that suppress everything are in real models, and libraries in C (NumPy's
conversions) drop whatever Python raises and try something else. A difference that was found once stays found.
"""

import contextlib

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.apart import Net, normal_batches, train
from tests.helpers.state import drive


def positive(h):
    """0 or 1: sometimes another one for all samples than for the retained ones."""
    return (h.detach()[:, 0].mean() > 0).float()


def bare(read, h):
    try:
        return read(h)
    except:  # noqa: E722
        return 1.0


def base_exception(read, h):
    try:
        return read(h)
    except BaseException:
        return 1.0


def suppressed(read, h):
    value = 1.0
    with contextlib.suppress(BaseException):
        value = read(h)
    return value


def returned(read, h):
    value = 1.0
    try:
        value = read(h)
    finally:
        return value  # noqa: B012


def tried_twice(read, h):
    for _ in range(2):
        try:
            return read(h)
        except BaseException:
            continue
    return 1.0


SWALLOWING = [bare, base_exception, suppressed, returned, tried_twice]


@pytest.mark.parametrize("how", SWALLOWING)
@pytest.mark.parametrize("read", [bool, float, lambda t: t.tolist(), lambda t: t.numpy().max(), np.float64])
def test_a_value_that_differs_is_not_swallowed(how, read):
    model = Net(lambda h: h * 2 if how(lambda h: read(positive(h)), h) else h * 3)
    outcome = train(model, normal_batches(20, 8, 16), rate=0).assert_right()
    assert set(outcome.stats.recompute_reasons) == {"the shallow part branches on values of the batch"}
    assert any(outcome.replayed)


class Either(nn.Module):
    """One of two layers, by a number that the batch brings along, within a clause that swallows everything."""

    def __init__(self, how):
        super().__init__()
        self.ways, self.how = nn.ModuleList(nn.Linear(16, 16) for _ in range(2)), how

    def forward(self, h):
        return self.how(lambda h: self.ways[int(positive(h))](h), h) * h


@pytest.mark.parametrize("how", [bare, base_exception])
def test_a_layer_that_differs_is_not_swallowed(how):
    train(Net(Either(how)), normal_batches(20, 8, 16), rate=0).assert_right()


class Guarded(nn.Module):
    """The cut lies within a clause that swallows everything; what comes behind it has state."""

    def __init__(self, how):
        super().__init__()
        self.a, self.cut, self.f, self.how = nn.Linear(6, 8), nn.Identity(), nn.Linear(8, 3), how
        self.register_buffer("n", torch.zeros(1))
        self.passed = 0

    def forward(self, x):
        h = self.how(lambda x: self.cut(self.a(x)), x)
        if not isinstance(h, torch.Tensor):
            h = x.new_zeros(len(x), 8)
        self.passed += 1
        self.n += 1
        return self.f(h)


@pytest.mark.parametrize("reuse", ["auto", "recompute"])
@pytest.mark.parametrize("how", SWALLOWING)
def test_a_cut_within_such_a_clause_is_right(how, reuse):
    """The end of a probe may be swallowed too; still the model is what plain training made it."""
    drive(lambda: Guarded(how), steps=3, reuse=reuse)
