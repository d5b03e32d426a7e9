"""DivBS: what a naive greedy on all gradients of the last layer picks, and what is drawn beyond their span."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfway.selectors.divbs import DivBS, greedy, inner_products
from halfway.selectors.tools.losses import logit_gradients
from tests.helpers.classified import (
    CLASSES,
    candidates,
    skewed_batch,
    slow_losses,
)
from tests.helpers.draws import generator, within


def naive_greedy(g, count):
    """Gradients (B, P) in float64, Gram-Schmidt twice; stops where nothing is left to explain."""
    residual, basis, rows = g.mean(0), [], []
    scale = residual.norm() * g.norm(dim=1).max()
    for _ in range(count):
        best, towards = -1, 1e-9 * scale
        for i in range(len(g)):
            if i not in rows and abs(g[i] @ residual) > towards:
                best, towards = i, abs(g[i] @ residual)
        if best < 0:
            break
        e = g[best].clone()
        for _ in range(2):
            for other in basis:
                e -= (e @ other) * other
        e /= e.norm()
        basis.append(e)
        residual = residual - (residual @ e) * e
        rows.append(best)
    return rows


def test_a_pick_that_is_drawn_follows_the_projections_step_by_step():
    g = torch.randn(7, 3, generator=generator(4), dtype=torch.float64)
    gram, source, draws = g @ g.T, generator(5), 4000
    first, second = torch.zeros(7), torch.zeros(7)
    for _ in range(draws):
        rows = greedy(gram, 2, source, "drawn").tolist()
        assert len(set(rows)) == 2
        first[rows[0]] += 1
        if rows[0] == int((g @ g.mean(0)).abs().argmax()):
            second[rows[1]] += 1
    towards = (g @ g.mean(0)).abs()
    for count, share in zip(first.tolist(), (towards / towards.sum()).tolist(), strict=True):
        assert within(count / draws, share, draws)
    # Given the first, the second is drawn by what is left of the mean.
    e = g[int(towards.argmax())] / g[int(towards.argmax())].norm()
    left = (g @ (g.mean(0) - (g.mean(0) @ e) * e)).abs()
    left[int(towards.argmax())] = 0.0
    given = int(second.sum())
    for count, share in zip(second.tolist(), (left / left.sum()).tolist(), strict=True):
        assert within(count / given, share, given)


def test_drawn_and_largest_differ_and_an_unknown_pick_is_named():
    g = torch.randn(32, 40, generator=generator(6), dtype=torch.float64)
    largest = set(greedy(g @ g.T, 16, generator(0)).tolist())
    common = [len(largest & set(greedy(g @ g.T, 16, generator(i), "drawn").tolist())) / 16 for i in range(20)]
    assert 0.5 < sum(common) / 20 < 0.9
    with pytest.raises(ValueError, match=r"unknown pick 'best'; choose one of \('largest', 'drawn'\)"):
        DivBS("best")


def weight_gradients(layer, h, targets, behind=lambda y: y):
    """(B, P) float64: autograd's gradient of each sample's loss with respect to the layer's weight."""
    layer, rows = layer.double(), []
    for i in range(len(h)):
        loss = slow_losses(behind(layer(h[i : i + 1].double())), targets[i : i + 1])
        rows.append(torch.autograd.grad(loss.sum(), layer.weight)[0].flatten())
    return torch.stack(rows)


def test_divbs_picks_what_a_naive_greedy_on_all_gradients_picks():
    for seed in range(12):
        torch.manual_seed(seed)
        B, D = 24, 7
        layer, h, targets = nn.Linear(D, CLASSES), torch.randn(B, D), torch.randint(CLASSES, (B,))
        with torch.no_grad():
            logits = layer(h)
        expected = naive_greedy(weight_gradients(layer, h, targets), 14)
        assert len(expected) == 14
        selector = DivBS()
        selector.watches(nn.Sequential(layer))
        found = selector.select(candidates(logits.float(), targets, watched=h), 14)
        assert found.indices.tolist() == sorted(expected)
        assert found.importance is None


def test_the_order_of_the_picks_and_the_inner_products_are_exact():
    torch.manual_seed(0)
    g = torch.randn(30, 50, dtype=torch.float64)
    assert greedy(g @ g.T, 20, generator()).tolist() == naive_greedy(g, 20)
    # Also next to a gradient a million times as large.
    g[3] *= 1e6
    assert greedy(g @ g.T, 20, generator()).tolist() == naive_greedy_any_scale(g, 20)


def naive_greedy_any_scale(g, count):
    rows, residual, basis = [], g.mean(0), []
    for _ in range(count):
        towards = (g @ residual).abs()
        towards[rows] = -1
        rows.append(int(towards.argmax()))
        e = g[rows[-1]].clone()
        for _ in range(3):
            for other in basis:
                e -= (e @ other) * other
        basis.append(e / e.norm())
        for other in basis:
            residual = residual - (residual @ other) * other
    return rows


@pytest.mark.parametrize("rank", [1, 4])
def test_beyond_the_span_of_the_gradients_the_rest_is_random(rank):
    torch.manual_seed(rank)
    g = (torch.randn(20, rank) @ torch.randn(rank, 40)).double()
    prefix = naive_greedy(g, 12)
    assert len(prefix) == rank
    rests = []
    for seed in range(200):
        found = greedy(g @ g.T, 12, generator(seed)).tolist()
        assert found[:rank] == prefix
        assert len(set(found)) == 12
        rests += found[rank:]
    for row in set(range(20)) - set(prefix):
        assert within(rests.count(row) / 200, (12 - rank) / (20 - rank), 200)


def test_of_copies_only_one_is_needed():
    torch.manual_seed(0)
    g = torch.randn(6, 30, dtype=torch.float64).repeat(2, 1)
    assert sorted(row % 6 for row in greedy(g @ g.T, 6, generator()).tolist()) == list(range(6))


def test_gradients_that_vanish_leave_a_random_choice():
    chosen = torch.zeros(6)
    for seed in range(300):
        chosen[greedy(torch.zeros(6, 6, dtype=torch.float64), 2, generator(seed))] += 1
    assert all(within(frequency, 1 / 3, 300) for frequency in (chosen / 300).tolist())


@pytest.mark.parametrize("scale", [1, 2])
def test_divbs_for_dense_outputs_sums_over_positions(scale):
    """With nearest neighbours behind the last layer, averaging to its resolution is exact."""
    torch.manual_seed(scale)
    B, D = 10, 3
    layer, h = nn.Conv2d(D, CLASSES, 1), torch.randn(B, D, 4, 6)
    masks = torch.randint(CLASSES, (B, 4 * scale, 6 * scale))
    masks[:, 0] = 255

    def upsampled(y):
        return F.interpolate(y, scale_factor=scale, mode="nearest") if scale > 1 else y

    with torch.no_grad():
        logits = upsampled(layer(h))
    g = weight_gradients(layer, h, masks, upsampled)
    expected = naive_greedy(g, 5)
    selector = DivBS()
    selector.watches(nn.Sequential(nn.Conv2d(3, D, 3), layer))
    found = selector.select(candidates({"out": logits, "aux": None}, masks, size=B, watched=h), 5)
    assert found.indices.tolist() == sorted(expected)
    delta = logit_gradients(logits, masks)
    assert torch.allclose(inner_products(delta, h) * scale**4, g @ g.T, rtol=1e-4, atol=1e-8)


def test_inner_products_of_other_shapes():
    torch.manual_seed(0)
    delta, h = torch.randn(4, CLASSES), torch.randn(4, 3, 6)
    # One prediction from many positions: their mean.
    g = torch.einsum("bc,bd->bcd", delta, h.mean(2)).flatten(1).double()
    assert torch.allclose(inner_products(delta, h), g @ g.T, atol=1e-5)
    # Many predictions from one position: they add up.
    dense = torch.randn(4, CLASSES, 2, 3)
    g = torch.einsum("bcxy,bd->bcd", dense, h.mean(2)).flatten(1).double()
    assert torch.allclose(inner_products(dense, h.mean(2)), g @ g.T, atol=1e-5)
    # Nothing but the logits: all positions count.
    g = dense.flatten(1).double()
    assert torch.allclose(inner_products(dense, None), g @ g.T, atol=1e-5)
    # Sequences.
    long = torch.randn(4, CLASSES, 12)
    g = torch.einsum("bcx,bdx->bcd", long.unflatten(2, (6, 2)).mean(3), h).flatten(1).double()
    assert torch.allclose(inner_products(long, h), g @ g.T, atol=1e-5)


def test_a_layer_that_does_not_give_the_logits_is_not_used():
    logits, targets = skewed_batch()
    selector = DivBS()
    selector.watches(nn.Sequential(nn.Linear(3, CLASSES + 1)))
    found = selector.select(candidates(logits, targets, watched=torch.randn(12, 3)), 3)
    alone = DivBS().select(candidates(logits, targets), 3)
    assert torch.equal(found.indices, alone.indices)
