"""Selectors that look at the model's outputs, each against a slow reference, a closed form or a simulation."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfway import ForwardBlocker, Schedule
from halfway.selectors import Candidates, Loss, LossRank
from halfway.selectors.divbs import DivBS, greedy, inner_products
from halfway.selectors.grad_norm import GradNorm
from halfway.selectors.rho import Rho
from halfway.selectors.selective_backprop import SelectiveBackprop
from halfway.selectors.tools.last_layer import channels_first, last_linear, width_of
from halfway.selectors.tools.losses import cross_entropy, logit_gradients
from halfway.selectors.uncertainty import Uncertainty
from halfway.state.ranks import Ranks

from ..helpers import processes
from ..helpers.waiting import NoWaiting


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def candidates(outputs, targets=None, seed=0, size=None, **others):
    source = seed if isinstance(seed, torch.Generator) else generator(seed)
    return Candidates(len(outputs) if size is None else size, source, outputs=outputs, targets=targets, **others)


def as_losses(outputs, targets):
    """A loss function for tests that think in losses: the outputs are the losses."""
    return outputs


def within(frequency, probability, draws, sigmas=5.0):
    return abs(frequency - probability) <= sigmas * math.sqrt(probability * (1 - probability) / draws) + 1e-12


def same_history(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


# --------------------------------------------------------------------------- losses and gradients per sample

CLASSES = 5


def some_targets(kind, size=6):
    source = generator(1)
    classes = torch.randint(CLASSES, (size,), generator=source)
    if kind == "classes":
        return classes
    if kind == "ignored classes":
        return torch.where(torch.arange(size) == 2, -100, classes)
    if kind == "soft":
        return torch.rand(size, CLASSES, generator=source).softmax(1)
    masks = torch.randint(CLASSES, (size, 4, 6), generator=source)
    masks[0, :2] = 255
    masks[1, 0, 0] = -100
    masks[3] = 255  # an image without labels
    return masks


def some_logits(targets, seed=0):
    positions = targets.shape[1:] if targets.ndim == 3 else ()
    return torch.randn(len(targets), CLASSES, *positions, generator=generator(seed))


def slow_losses(logits, targets):
    """One sample at a time, by PyTorch's own function, in the precision of the logits."""
    losses = []
    for row, target in zip(logits, targets, strict=True):
        if target.is_floating_point():
            losses.append(F.cross_entropy(row[None], target[None].to(row)))
        else:
            target = torch.where(target == 255, -100, target) if target.ndim else target
            if (target < 0).all():
                losses.append(row.sum() * 0)
            else:
                losses.append(F.cross_entropy(row[None], target[None]))
    return torch.stack(losses)


KINDS = ["classes", "ignored classes", "soft", "masks"]


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_per_sample_are_those_of_autograd(kind):
    targets = some_targets(kind)
    logits = some_logits(targets)
    exact = logits.double().requires_grad_()
    expected = slow_losses(exact, targets)
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    found = cross_entropy(logits, targets)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), expected, atol=1e-6)
    assert torch.allclose(logit_gradients(logits, targets).double(), gradient, atol=1e-6)
    assert torch.allclose(logit_gradients(logits, targets, slow_losses).double(), gradient, atol=1e-6)


def test_logits_are_found_in_what_models_return():
    targets = some_targets("masks")
    logits, other = some_logits(targets), some_logits(targets, seed=5)
    expected, gradient = cross_entropy(logits, targets), logit_gradients(logits, targets)
    assert float(expected[3]) == 0  # the image without labels
    for outputs in (
        {"out": logits, "aux": other},
        OrderedDict(loss=torch.zeros(()), logits=logits, hidden_states=other),
        (logits, other),
        [logits],
        logits.to(torch.float64),
    ):
        assert torch.allclose(cross_entropy(outputs, targets).float(), expected, atol=1e-6)
        assert torch.allclose(logit_gradients(outputs, targets), gradient, atol=1e-6)
    with pytest.raises(TypeError, match="loss_fn"):
        cross_entropy({"features": logits}, targets)
    with pytest.raises(ValueError, match="target="):
        cross_entropy(logits, targets[:3])
    with pytest.raises(ValueError, match=r"a single class.*loss_fn"):  # regression: 0 for every sample, silently
        cross_entropy(logits[:, :1], logits[:, 0])


def test_masks_of_another_resolution_are_met_by_interpolation():
    masks = some_targets("masks")
    logits = torch.randn(6, CLASSES, 2, 3, generator=generator())
    exact = logits.double().requires_grad_()
    expected = slow_losses(F.interpolate(exact, (4, 6), mode="bilinear", align_corners=False), masks)
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    assert torch.allclose(cross_entropy(logits, masks).double(), expected, atol=1e-6)
    assert torch.allclose(logit_gradients(logits, masks).double(), gradient, atol=1e-6)


def test_gradients_are_given_where_grad_is_off():
    targets = some_targets("classes")
    with torch.no_grad():
        assert logit_gradients(some_logits(targets), targets).abs().sum() > 0


# ----------------------------------------------------------------------------------------------------- loss


def test_loss_retains_the_largest_losses():
    targets = some_targets("masks")
    logits = some_logits(targets)
    expected = slow_losses(logits.double(), targets)
    found = Loss().select(candidates({"out": logits}, targets, size=6), 3)
    assert found.indices.tolist() == sorted(expected.topk(3).indices.tolist())
    assert torch.allclose(found.importance.double(), expected, atol=1e-6)
    assert found.weights is None


def test_loss_by_rank_draws_with_the_probabilities_it_states():
    losses = torch.tensor([2.0, 0.3, 5.0, 0.1, 1.0])
    selector, source, draws = LossRank(pressure=20, loss_fn=as_losses), generator(3), 2500
    share = torch.tensor([math.exp(-math.log(20) * i / 5) for i in range(5)])  # of the i-th largest
    expected = (share / share.sum())[[1, 3, 0, 4, 2]].tolist()
    counts = torch.zeros(5)
    for _ in range(draws):
        counts[selector.select(candidates(losses, seed=source), 1).indices] += 1
    for frequency, probability in zip((counts / draws).tolist(), expected, strict=True):
        assert within(frequency, probability, draws)


# --------------------------------------------------------------------------------------- Selective-Backprop


def remembering(*losses, history=8, **settings):
    selector = SelectiveBackprop(history=history, loss_fn=as_losses, **settings)
    for batch in losses:
        selector.learn(candidates(torch.tensor(batch)), None)
    return selector


def history_of(selector):
    return selector.state_dict()["losses"]


def test_percentiles_are_those_in_the_history():
    selector = remembering([1.0, 2.0], [2.0, 4.0])
    found = selector.importance(candidates(torch.tensor([0.5, 1.5, 2.0, 3.0, 9.0])))
    # (rank + 1/2) / 5; the two equal ones count half.
    assert found.tolist() == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])


def test_an_empty_history_is_the_batch_itself():
    found = remembering().importance(candidates(torch.tensor([3.0, 1.0, 2.0, 2.0])))
    assert found.tolist() == pytest.approx([7 / 8, 1 / 8, 1 / 2, 1 / 2])


def test_the_history_is_a_ring_of_the_last_losses():
    selector = remembering(history=5)
    shape, seen = history_of(selector).shape, []
    for batch in ([1.0, 2.0], [3.0], [4.0, 5.0, 6.0], [7.0] * 4 + [8.0, 9.0, 10.0]):
        selector.learn(candidates(torch.tensor(batch)), torch.tensor([0]))
        seen += batch
        last = seen[-5:]
        assert history_of(selector).shape == shape
        assert history_of(selector)[: 5 - len(last)].isnan().all()
        assert history_of(selector)[5 - len(last) :].tolist() == last


def test_learning_takes_the_losses_of_the_choice_and_of_all_samples():
    calls = []

    def counted(outputs, targets):
        calls.append(1)
        return outputs

    selector = SelectiveBackprop(history=4, loss_fn=counted)
    one = candidates(torch.tensor([1.0, 2.0, 3.0]))
    selection = selector.select(one, 1)
    selector.learn(one, selection.indices)
    assert len(calls) == 1
    assert history_of(selector)[1:].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_the_acceptance_follows_the_power_law(share):
    """Losses from one distribution, whose percentiles are known without any history."""
    size, steps = 512, 150
    count, beta = round(share * size), (1 - share) / share
    selector, source = SelectiveBackprop(loss_fn=as_losses), generator(5)
    bins, accepted, offered, expected = 8, torch.zeros(8), torch.zeros(8), torch.zeros(8)
    for step in range(2 + steps):
        u = torch.rand(size, generator=source)
        now = candidates(-(-u).log1p(), seed=source)  # exponential
        rows = selector.select(now, count).indices
        selector.learn(now, rows)
        assert len(rows.unique()) == count
        if step < 2:  # the history fills
            continue
        which = (u * bins).long()
        offered += which.bincount(minlength=bins)
        accepted += which[rows].bincount(minlength=bins)
        expected.index_add_(0, which, u**beta)
    # Within each batch the power law is scaled to the exact number, which bends the average by the order of 1/B.
    assert torch.allclose(accepted / offered, expected / offered, atol=0.015)


def test_within_a_batch_probabilities_are_proportional_to_the_power_of_the_percentile():
    selector, source, draws = remembering([float(i) for i in range(9)], history=9, beta=2.0), generator(6), 1200
    losses = torch.tensor([0.5, 2.5, 4.5, 6.5, 8.5])
    expected = torch.tensor([0.15, 0.35, 0.55, 0.75, 0.95]).square()
    expected = 2 * expected / expected.sum()
    counts = torch.zeros(5)
    for _ in range(draws):
        counts[selector.select(candidates(losses, seed=source), 2).indices] += 1
    for frequency, probability in zip((counts / draws).tolist(), expected.tolist(), strict=True):
        assert within(frequency, probability, draws)


def test_beta_zero_is_uniform():
    selector, source, draws = remembering(beta=0.0), generator(7), 600
    counts = torch.zeros(4)
    for _ in range(draws):
        counts[selector.select(candidates(torch.tensor([1.0, 2.0, 3.0, 400.0]), seed=source), 2).indices] += 1
    assert all(within(frequency, 0.5, draws) for frequency in (counts / draws).tolist())


def test_a_history_goes_on_from_its_state():
    selector = remembering([1.0, 2.0, 3.0])
    other = remembering()
    state = selector.state_dict()
    other.load_state_dict(state)
    state["losses"].zero_()  # copies, both ways
    assert same_history(history_of(other), history_of(selector))
    batch = torch.tensor([0.5, 1.5, 2.5, 3.5])
    assert torch.equal(other.importance(candidates(batch)), selector.importance(candidates(batch)))
    other.learn(candidates(batch), None)
    assert not same_history(history_of(other), history_of(selector))
    with pytest.raises(ValueError, match="losses"):
        remembering(history=9).load_state_dict(selector.state_dict())
    with pytest.raises(ValueError, match="losses"):
        remembering().load_state_dict({})
    assert remembering(beta=1.0).config() != remembering(beta=2.0).config()


def _learn_together(rank):
    """Uneven batches; the second rank runs out of them."""
    ranks = Ranks()
    selector = SelectiveBackprop(history=6, loss_fn=as_losses)
    states, batches = [], [[[1.0, 2.0], [5.0], [7.0, 8.0, 9.0, 10.0]], [[3.0, 4.0, 4.5], [6.0]]][rank]
    for step in range(3):
        if step < len(batches):
            now = candidates(torch.tensor(batches[step]), ranks=ranks)
            rows = selector.select(now, 1).indices if step else None
            selector.learn(now, rows)
        else:
            ranks.send_nothing()
        states.append(selector.state_dict()["losses"])
    return states


def test_two_ranks_remember_the_same_losses():
    first, second = processes.run(2, _learn_together)
    for mine, theirs in zip(first, second, strict=True):
        assert same_history(mine, theirs)
    # In turn over the ranks; each may give its share, 3 of 6.
    assert first[0][0].isnan()
    assert first[0][1:].tolist() == [1.0, 3.0, 2.0, 4.0, 4.5]
    assert first[1].tolist() == [3.0, 2.0, 4.0, 4.5, 5.0, 6.0]
    assert first[2].tolist() == [4.5, 5.0, 6.0, 8.0, 9.0, 10.0]


def test_settings_that_make_no_sense_are_refused():
    for wrong in ({"beta": -1.0}, {"beta": math.nan}, {"history": 0}):
        with pytest.raises(ValueError, match="|".join(wrong)):
            SelectiveBackprop(**wrong)
    with pytest.raises(ValueError, match="uniform"):
        GradNorm(uniform=1.5)
    with pytest.raises(ValueError, match="least_confidence"):
        Uncertainty("doubt")  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------- gradient norms


def skewed_batch(size=12, sharpness=3.0):
    """Most samples are classified well, two are not."""
    logits = sharpness * torch.randn(size, CLASSES, generator=generator())
    targets = logits.argmax(1)
    targets[:2] = logits[:2].argmin(1)
    return logits, targets


def test_the_importance_is_the_norm_of_the_gradient():
    for kind in KINDS:
        targets = some_targets(kind)
        logits = some_logits(targets)
        exact = logits.double().requires_grad_()
        (gradient,) = torch.autograd.grad(slow_losses(exact, targets).sum(), exact)
        found = GradNorm().select(candidates((logits, None), targets, size=6), 3)
        assert torch.allclose(found.importance.double(), gradient.flatten(1).norm(dim=1), atol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.1])
def test_weighted_losses_estimate_the_mean_of_the_batch_without_bias(uniform):
    logits, targets = skewed_batch()
    losses = cross_entropy(logits, targets).double()
    selector, source, draws = GradNorm(uniform), generator(8), 800
    estimates, counts, weights = [], torch.zeros(12), torch.zeros(12)
    for _ in range(draws):
        found = selector.select(candidates(logits, targets, seed=source), 4)
        assert found.weights.dtype == torch.float32
        estimates.append((found.weights * losses[found.indices]).mean())
        counts[found.indices] += 1
        weights[found.indices] = found.weights
    estimates = torch.stack(estimates)
    assert abs(estimates.mean() - losses.mean()) < 5 * estimates.std() / math.sqrt(draws) + 1e-6
    # Each is drawn as often as its weight says.
    drawn = counts > 0
    for count, weight in zip(counts[drawn].tolist(), weights[drawn].tolist(), strict=True):
        assert within(count / draws, 4 / (12 * weight), draws)
    assert float(weights.max()) > 2
    if uniform:
        assert float(weights.max()) <= 1 / uniform + 1e-5


def test_the_estimate_of_the_gradient_varies_less_than_with_uniform_sampling():
    logits, targets = skewed_batch(32, sharpness=12.0)
    gradients = logit_gradients(logits, targets)
    errors = {}
    for uniform in (0.1, 1.0):
        selector, source = GradNorm(uniform), generator(9)
        found = [selector.select(candidates(logits, targets, seed=source), 8) for _ in range(200)]
        estimates = torch.stack([(s.weights[:, None] * gradients[s.indices]).mean(0) for s in found])
        errors[uniform] = float((estimates - gradients.mean(0)).square().sum(1).mean())
        if uniform == 1:
            assert all(torch.allclose(s.weights, torch.ones(8)) for s in found)
    assert errors[0.1] < 0.2 * errors[1.0]


def test_certain_samples_have_the_weight_of_certainty():
    logits, targets = skewed_batch()
    found = GradNorm().select(candidates(logits, targets), 9)
    assert {0, 1} <= set(found.indices.tolist())
    assert found.weights[:2].tolist() == pytest.approx([9 / 12, 9 / 12])


# ---------------------------------------------------------------------------------------------------- DivBS


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


# ------------------------------------------------------------------------------------------ the last layer


class WithHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3)
        self.classifier = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, CLASSES, 1))
        self.aux_classifier = nn.Sequential(nn.Conv2d(8, CLASSES, 1))
        self.AuxLogits = nn.Linear(8, CLASSES)


def test_the_last_linear_layer_is_found():
    model = WithHeads()
    assert last_linear(model) is model.classifier[3]
    assert width_of(model.classifier[3]) == CLASSES
    mlp = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, CLASSES), nn.LogSoftmax(1))
    assert last_linear(mlp) is mlp[2]
    assert width_of(mlp[2]) == CLASSES
    tokens = nn.Sequential(nn.Linear(3, 4), nn.Conv1d(4, CLASSES, 1))
    assert last_linear(tokens) is tokens[1]


def test_a_model_that_ends_in_something_else_has_none():
    assert last_linear(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, CLASSES, 3))) is None  # smp's U-Net, say
    assert last_linear(nn.Sequential(nn.Linear(3, 8), nn.Conv2d(8, 8, 1, groups=8))) is None
    assert last_linear(nn.ReLU()) is None


def test_features_of_a_linear_layer_are_last_and_of_a_convolution_first():
    linear, convolution = nn.Linear(3, 2), nn.Conv2d(3, 2, 1)
    assert channels_first(torch.zeros(4, 3), linear).shape == (4, 3)
    assert channels_first(torch.zeros(4, 7, 3), linear).shape == (4, 3, 7)
    assert channels_first(torch.zeros(4, 5, 7, 3), linear).shape == (4, 3, 5, 7)
    assert channels_first(torch.zeros(4, 3, 5, 7), convolution).shape == (4, 3, 5, 7)
    assert channels_first(torch.zeros(4, 7, 3), None).shape == (4, 3, 7)


# ----------------------------------------------------------------------------------------------------- RHO


def test_rho_retains_what_exceeds_its_irreducible_loss():
    losses, irreducible = torch.tensor([5.0, 1.0, 3.0, 0.2]), torch.tensor([9.0, 0.1, 4.9, 9.0, 0.1, 0.1])
    ids = torch.tensor([2, 4, 1, 5])
    found = Rho(irreducible, loss_fn=as_losses).select(candidates(losses, ids=ids), 2)
    assert found.importance.tolist() == pytest.approx([0.1, 0.9, 2.9, 0.1])
    assert found.indices.tolist() == [1, 2]  # not the largest loss: it stays large whatever one does


def test_rho_reads_the_file_that_training_writes(tmp_path):
    irreducible = torch.rand(8)
    torch.save({"losses": irreducible, "recipe": "tiny-cifar10"}, tmp_path / "losses.pt")
    for source in (tmp_path / "losses.pt", str(tmp_path / "losses.pt"), irreducible):
        selector = Rho(source, loss_fn=as_losses)
        found = selector.importance(candidates(torch.ones(3), ids=torch.tensor([7, 0, 3])))
        assert torch.equal(found, 1 - irreducible[[7, 0, 3]])
        assert selector.config() == Rho(irreducible, loss_fn=as_losses).config()
    assert Rho(irreducible + 0.01, loss_fn=as_losses).config() != selector.config()
    assert Rho.wants_ids == "required"


def test_rho_says_how_to_get_the_losses(tmp_path):
    command = "halfway train RECIPE --method full data.holdout=true --save-losses FILE"
    with pytest.raises(ValueError, match=command):
        Rho()
    with pytest.raises(FileNotFoundError, match=f"missing.pt.*{command}"):
        Rho(tmp_path / "missing.pt")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(ValueError, match=f"text.pt is not a file of losses.*{command}"):
        Rho(tmp_path / "text.pt")
    torch.save({"losses": torch.rand(3), "code": tmp_path}, tmp_path / "code.pt")  # more than tensors and plain values
    with pytest.raises(ValueError, match=r"code\.pt is not a file"):
        Rho(tmp_path / "code.pt")
    torch.save({"weights": torch.rand(3)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=f"'losses'.*{command}"):
        Rho(tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"\(N,\)"):
        Rho(torch.rand(3, 2))
    with pytest.raises(ValueError, match=r"\(N,\)"):
        Rho(torch.arange(3))
    with pytest.raises(ValueError, match="for 2 of 4 samples, for example for id 1"):
        Rho(torch.tensor([0.0, math.nan, 1.0, math.inf]))


def test_rho_for_another_data_set_is_an_error():
    selector = Rho(torch.rand(5), loss_fn=as_losses)
    with pytest.raises(ValueError, match=r"5 samples, ids 0 to 4.*the data set you train on"):
        selector.select(candidates(torch.ones(2), ids=torch.tensor([1, 5])), 1)


# --------------------------------------------------------------------------------------------- uncertainty

MEASURES = {
    "entropy": lambda q: -sum(v * math.log(v) for v in q if v > 0),
    "least_confidence": lambda q: 1 - max(q),
    "margin": lambda q: 1 - (sorted(q)[-1] - sorted(q)[-2]),
}


@pytest.mark.parametrize("measure", MEASURES)
def test_uncertainty_has_its_closed_form(measure):
    q = torch.tensor([[0.25] * 4, [0.7, 0.1, 0.1, 0.1], [0.4, 0.4, 0.1, 0.1], [0.5, 0.5, 0.0, 0.0], [1.0, 0, 0, 0]])
    found = Uncertainty(measure).importance(candidates({"logits": q.log()}, size=5))
    assert found.tolist() == pytest.approx([MEASURES[measure](row) for row in q.tolist()], abs=1e-6)
    assert int(found.argmax()) == 0 or measure == "margin"
    largest = {"entropy": math.log(4), "least_confidence": 0.75, "margin": 1.0}[measure]
    random = Uncertainty(measure).importance(candidates(torch.randn(200, 4, generator=generator())))
    assert float(random.max()) < float(found[0]) == pytest.approx(largest)


@pytest.mark.parametrize("measure", MEASURES)
def test_uncertainty_of_an_image_is_the_mean_over_its_pixels(measure):
    logits = torch.randn(3, 4, 2, 5, generator=generator())
    q = logits.double().softmax(1)
    expected = [
        sum(MEASURES[measure](q[i, :, y, x].tolist()) for y in range(2) for x in range(5)) / 10 for i in range(3)
    ]
    assert Uncertainty(measure).importance(candidates(logits)).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("measure", MEASURES)
def test_small_doubts_are_told_apart(measure):
    """1 - q1 in float32 would be 0 for all of them."""
    logits = torch.tensor([[30.0, 0, 0], [20.0, 0, 0], [25.0, 0, 0], [40.0, 0, 0]])
    assert Uncertainty(measure).select(candidates(logits), 2).indices.tolist() == [1, 2]


def test_uncertainty_needs_no_targets_but_classes():
    assert Uncertainty.wants_targets == "no"
    with pytest.raises(ValueError, match="two classes"):
        Uncertainty().select(candidates(torch.randn(4, 1)), 2)


# ------------------------------------------------------------------------------------------------- all of them

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
