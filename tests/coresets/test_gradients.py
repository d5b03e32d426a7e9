"""Gradients of single samples, against one backward pass per sample in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfway.coresets import measure
from halfway.coresets.gradients import add_gradient, alignments, gradient_norms, parameters_of
from halfway.coresets.outputs import errors
from tests.helpers.draws import generator, randn

N = 11


def net(seed=0):
    """A small network with BatchNorm and dropout, whose running statistics are not trivial."""
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 5), nn.ReLU()
    )
    model = nn.Sequential(model, nn.Linear(5, 4)).double()
    source = generator(seed)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=source, dtype=torch.float64) - 0.3)
    model[0][1].running_var.abs_()
    return model


def data():
    return randn(N, 2, 4, 4, seed=2).double(), torch.arange(N) % 4


def batches(size=4):
    inputs, labels = data()
    order = torch.randperm(N, generator=generator(3))
    return [(inputs[ids], labels[ids], ids) for ids in order.split(size)]


def slow_gradients(model):
    """(N, parameters): one backward pass per sample."""
    inputs, labels = data()
    rows = []
    for x, y in zip(inputs, labels, strict=True):
        loss = F.cross_entropy(model(x[None]), y[None])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return torch.stack(rows)


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_norms_are_those_of_single_backward_passes(chunk):
    model = net().eval()
    assert torch.allclose(gradient_norms(model, *data(), chunk=chunk), slow_gradients(model).norm(dim=1), rtol=1e-10)


def test_alignments_are_dot_products_with_single_gradients():
    model = net().eval()
    slow = slow_gradients(model)
    total = {name: torch.zeros_like(p) for name, p in parameters_of(model).items()}
    add_gradient(total, model, *data())
    assert torch.allclose(torch.cat([g.flatten() for g in total.values()]), slow.sum(0), rtol=1e-10)
    assert torch.allclose(alignments(model, *data(), total), slow @ slow.sum(0), rtol=1e-10)


def test_a_short_run_has_every_sample_at_its_place():
    model, (inputs, labels) = net(), data()
    found = measure.short_run(model, batches(), N, gradients=True)
    assert model.training
    assert model[0][4].training
    model.eval()
    features = model[0](inputs)
    assert torch.allclose(found.error_norms_N, errors(model(inputs), labels).norm(dim=1))
    assert torch.allclose(found.feature_norms_N, features.norm(dim=1))
    assert torch.allclose(found.gradient_norms_N, slow_gradients(model).norm(dim=1))
    assert measure.short_run(model, batches(), N).gradient_norms_N is None


def test_a_trained_proxy_shows_logits_and_features():
    model, (inputs, _) = net(), data()
    found = measure.outputs(model, batches(), N)
    inner = measure.outputs(model, batches(), N, layer=model[0][5])
    model.eval()
    assert torch.allclose(found.logits_NC, model(inputs))
    assert torch.allclose(found.features_ND, model[0](inputs))
    assert inner.features_ND.shape == (N, 12)
    assert not model[1]._forward_pre_hooks


def test_a_checkpoint_has_the_agreement_with_the_mean_gradient():
    model = net()
    found = measure.checkpoint(model, batches(), N, lr=0.3)
    assert model.training
    model.eval()
    slow = slow_gradients(model)
    assert found.lr == 0.3
    assert torch.allclose(found.alignments_N, slow @ slow.mean(0), rtol=1e-9)
    assert torch.allclose(found.square_norms_N, slow.square().sum(1), rtol=1e-9)
    assert measure.checkpoint(model, batches(), N, lr=0.3, own_share=False).square_norms_N is None


def test_the_model_is_left_as_it_was():
    model, untouched = net(), net()
    measure.outputs(model, batches(), N)
    measure.short_run(model, batches(), N, gradients=True)
    measure.checkpoint(model, batches(), N, lr=0.1)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, untouched.state_dict()[name]), name
    assert all(p.grad is None for p in model.parameters())


def test_batches_that_do_not_cover_the_data_set_are_refused():
    with pytest.raises(ValueError, match=r"no logits for 3 of 11 samples.*without drop_last"):
        measure.outputs(net(), batches()[:2], N)
    with pytest.raises(ValueError, match="no logits for 1 of 12 samples"):
        measure.outputs(net(), batches(), N + 1)
    with pytest.raises(ValueError, match=r"num_samples is 10; ids are positions"):
        measure.outputs(net(), batches(), N - 1)
    with pytest.raises(ValueError, match="with a loader that can be gone through again"):
        measure.checkpoint(net(), iter(batches()), N, lr=0.1)
    with pytest.raises(ValueError, match="has no linear layer; pass the layer"):
        measure.outputs(nn.Conv2d(2, 3, 3).double(), batches(), N)
    unused = net()
    unused.head = nn.Linear(2, 2)
    unused.forward = lambda x: unused[1](unused[0](x))
    with pytest.raises(ValueError, match=r"last linear layer was not called; pass its classifier: layer="):
        measure.outputs(unused, batches(), N)

    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.aside = net(), nn.Linear(2, 7).double()

        def forward(self, x):
            self.aside(x.flatten(1)[:, :2])
            return self.net(x)

    with pytest.raises(ValueError, match=r"gives 7 values, not 4 logits; pass its classifier"):
        measure.outputs(Auxiliary(), batches(), N)
    assert measure.outputs(unused, batches(), N, layer=unused[1]).features_ND.shape == (N, 5)
    with pytest.raises(TypeError, match="classifiers that return logits"):
        gradient_norms(Tupled().double(), *data())


class Tupled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return (self.inner(x),)
