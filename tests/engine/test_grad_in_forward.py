"""Models that differentiate in their own forward pass: energies and forces, penalties, inner loops.

Behind the cut nothing is special: steps are replayed, and nothing there runs but in the model's own call. Before the
cut a probe has nothing to differentiate, so the step is recomputed.
"""

import collections
import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

import halfway
from tests.helpers.apart import normal_batches, train

CALLS = collections.Counter()


class Count(nn.Module):
    """Counts its calls outside of the model, where nobody sets them back."""

    def forward(self, h):
        CALLS[id(self)] += 1
        return h


class Net(nn.Module):
    """A layer, `inner` before the cut or behind it, and a head. `inner(energy, h)` differentiates `energy`."""

    def __init__(self, inner, before):
        super().__init__()
        self.a, self.b, self.cut, self.count = nn.Linear(6, 8), nn.Linear(8, 8), nn.Identity(), Count()
        self.energy, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), nn.Linear(8, 3)
        self.inner, self.before = inner, before

    def forward(self, x):
        h = self.b(self.a(x).tanh())
        if self.before:
            h = self.inner(self.energy, h)
        h = self.count(self.cut(h))
        return self.head(h if self.before else self.inner(self.energy, h))


def forces(energy, h):
    z = h.detach().requires_grad_()
    return torch.autograd.grad(energy(z).sum(), z, create_graph=True)[0] + h


def forces_through_the_features(energy, h):
    return torch.autograd.grad(energy(h).sum(), h, create_graph=True)[0] + h


def forces_without_a_graph(energy, h):
    z = h.detach().requires_grad_()
    return torch.autograd.grad(energy(z).sum(), z)[0] + h + energy(h)


def backward(energy, h):
    """Into a leaf of its own."""
    z = h.detach().requires_grad_()
    (z.sin().sum() * 2).backward()
    return z.grad + h + energy(h)


def penalty(energy, h):
    """Double backward: the norm of a gradient scales what follows."""
    slope = torch.autograd.grad(energy(h).sum(), h, create_graph=True)[0]
    return h + energy(h) + (slope.norm(dim=1, keepdim=True) - 1).square()


def second_derivative(energy, h):
    first = torch.autograd.grad(energy(h).sum(), h, create_graph=True)[0]
    return h + torch.autograd.grad(first.square().sum(), h, create_graph=True)[0]


def inner_step(energy, h):
    """One step of an inner loop, as meta learning has it."""
    weights = dict(energy.named_parameters())
    loss = functional_call(energy, weights, h).square().mean(1).sum()
    slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    moved = {n: p - 0.1 * g for (n, p), g in zip(weights.items(), slopes, strict=True)}
    return h + functional_call(energy, moved, h)


def by_func_grad(energy, h):
    return h + grad(lambda z: energy(z).sum())(h)


def by_vmap_of_grad(energy, h):
    return h + vmap(grad(lambda z: energy(z).squeeze(-1)))(h)


def by_vjp(energy, h):
    value, pull = vjp(energy, h)
    return h + value + pull(torch.ones_like(value))[0]


def by_jacrev(energy, h):
    return h + vmap(jacrev(energy))(h).squeeze(1)


def by_functional_jacobian(energy, h):
    def summed(z):
        return energy(z).sum(0)

    return h + torch.autograd.functional.jacobian(summed, h, create_graph=True).squeeze(0)


def by_jvp(energy, h):
    """Forward mode."""
    return h + jvp(energy, (h,), (torch.ones_like(h),))[1]


INNER = [
    forces,
    forces_through_the_features,
    forces_without_a_graph,
    backward,
    penalty,
    second_derivative,
    inner_step,
    by_func_grad,
    by_vmap_of_grad,
    by_vjp,
    by_jacrev,
    by_functional_jacobian,
    by_jvp,
]
REUSE = pytest.mark.parametrize("reuse", ["auto", "recompute"])


def check_right(inner, before, reuse):
    model = Net(inner, before)
    CALLS.clear()
    outcome = train(model, normal_batches(4, 8, 6), reuse=reuse).assert_right()
    assert CALLS[id(model.count)] == 4, "nothing behind the cut runs for the blocker's sake"
    return outcome


@REUSE
@pytest.mark.parametrize("inner", INNER)
def test_derivatives_behind_the_cut_are_nothing_special(inner, reuse):
    outcome = check_right(inner, False, reuse)
    if reuse == "auto":
        outcome.assert_all_replayed()
        assert outcome.stats.operations_computed == 0
        assert outcome.stats.operations_replayed == 8


@REUSE
@pytest.mark.parametrize("inner", [i for i in INNER if i is not by_jvp])
def test_derivatives_before_the_cut_are_recomputed(inner, reuse):
    outcome = check_right(inner, True, reuse)
    assert not any(outcome.replayed)
    if reuse == "auto":
        (reason,) = outcome.stats.recompute_reasons
        assert "autograd" in reason


@REUSE
def test_forward_mode_before_the_cut_is_right(reuse):
    """It saves nothing, so it may be replayed."""
    check_right(by_jvp, True, reuse)


def test_a_demanded_replay_says_what_is_in_the_way():
    blocker = halfway.ForwardBlocker(Net(forces, before=True), "cut", 0.5, reuse="replay")
    with pytest.raises(halfway.ReplayError, match="autograd"):
        blocker(torch.randn(8, 6))


def test_the_first_recomputed_step_warns_once():
    model = Net(forces, before=True)
    blocker = halfway.ForwardBlocker(model, "cut", 0.5)
    with pytest.warns(UserWarning, match="autograd"):
        model(blocker(torch.randn(8, 6))).sum().backward()
    model(blocker(torch.randn(8, 6))).sum().backward()


@REUSE
@pytest.mark.parametrize("before", [False, True])
def test_a_gradient_penalty_on_the_inputs_trains(before, reuse):
    """Double backward through the whole model, outside of it: the retained inputs need gradients."""
    model = Net(lambda energy, h: h + energy(h), before)
    blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=halfway.Density(num_centroids=4), reuse=reuse)

    def gradients(net, x):
        net.zero_grad()
        out = net(x)
        slope = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
        (out.square().mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
        return torch.cat([p.grad.flatten() for p in net.parameters()])

    for x in normal_batches(3, 8, 6):
        plain = copy.deepcopy(model)
        retained = blocker(x).requires_grad_()
        found = gradients(model, retained)
        torch.testing.assert_close(found, gradients(plain, x[blocker.last.indices].requires_grad_()))
    if reuse == "auto":
        assert blocker.stats.steps_replayed == 3


def test_a_loss_computed_and_differentiated_in_forward_behind_the_cut_runs_once_per_step():
    """A discriminator that steps inside the generator's forward, behind the cut."""

    class Adversarial(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.cut, self.d = nn.Linear(6, 8), nn.Identity(), nn.Linear(8, 1)
            self.optimizer = torch.optim.SGD(self.d.parameters(), 0.1)

        def forward(self, x):
            h = self.cut(self.a(x))
            self.optimizer.zero_grad()
            self.d(h.detach()).mean().backward()
            self.optimizer.step()
            return self.d(h)

    model, plain = Adversarial(), Adversarial()
    plain.load_state_dict(model.state_dict())
    blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=halfway.Density(num_centroids=4))
    for x in normal_batches(3, 8, 6):
        model(blocker(x)).mean().backward()
        plain(x[blocker.last.indices]).mean().backward()
        torch.testing.assert_close(model.d.weight, plain.d.weight)
        torch.testing.assert_close(model.a.weight.grad, plain.a.weight.grad)
