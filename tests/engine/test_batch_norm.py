"""BatchNorm in a replayed step: statistics of all samples, running ones moved once per call."""

import copy

import pytest
import torch
from torch import nn

import halfway
from tests.helpers.reference import FullBatchNorm
from tests.helpers.replays import IMAGES, density, gradients, relative_difference, small_net


class WithFullBatchNorm(nn.Module):
    """A BatchNorm whose first call notes the statistics, and whose second one uses them for the retained samples."""

    def __init__(self, bn):
        super().__init__()
        self.bn, self.statistics = bn, None

    def forward(self, x):
        if self.statistics is None:
            self.statistics = x.mean((0, 2, 3)).detach(), x.var((0, 2, 3), correction=0).detach()
            return self.bn(x)
        return FullBatchNorm.apply(x, *self.statistics, self.bn.weight, self.bn.bias, self.bn.eps)


class Stop(Exception):
    pass


def run_to_the_cut(model, at, x):
    def stop(*_):
        raise Stop

    handle = model.get_submodule(at).register_forward_hook(stop)
    with torch.no_grad(), pytest.raises(Stop):
        model(x)
    handle.remove()


def with_full_batch_norm(model, at, x):
    """A copy of the model in which the BatchNorms that run before the cut do what a replay is documented to do."""
    scout = copy.deepcopy(model)
    visited = []
    for name, module in scout.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_pre_hook(lambda m, _, name=name: visited.append(name))
    run_to_the_cut(scout, at, x)
    reference = copy.deepcopy(model)
    for name in visited:
        parent, _, child = name.rpartition(".")
        owner = reference.get_submodule(parent)
        setattr(owner, child, WithFullBatchNorm(getattr(owner, child)))
    run_to_the_cut(reference, at, x)
    return reference


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "densenet121", "mobilenet_v3", "unet"])
def test_batch_norm_normalises_with_the_statistics_of_all_samples(name):
    build, at, size = IMAGES[name]
    model = build().train().double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    x = torch.randn(8, 3, size, size, dtype=torch.float64)
    reference = with_full_batch_norm(model, at, x)
    blocker = halfway.ForwardBlocker(model, at, 0.5, selector=density(), reuse="replay")
    found = gradients(model, blocker(x))
    assert blocker.stats.steps_replayed == 1
    expected = gradients(reference, x[blocker.last.indices])
    assert relative_difference(found, {n.replace(".bn.", "."): g for n, g in expected.items()}) < 1e-7
    for n, b in reference.named_buffers():
        torch.testing.assert_close(model.get_buffer(n.replace(".bn.", ".")), b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_running_statistics_of_a_replayed_step_are_those_of_all_samples_moved_once(dtype):
    model = small_net().to(dtype)
    plain = copy.deepcopy(model)
    x = torch.randn(8, 3, 8, 8, dtype=dtype)
    blocker = halfway.ForwardBlocker(model, "1", 0.5, selector=density(), reuse="replay")
    model(blocker(x)).sum().backward()
    plain[:2](x)
    torch.testing.assert_close(model[1].running_mean, plain[1].running_mean)
    torch.testing.assert_close(model[1].running_var, plain[1].running_var)
    assert model[1].num_batches_tracked == 1


def test_running_statistics_of_a_batch_norm_that_runs_twice_move_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
            self.norm = nn.BatchNorm2d(8, momentum=0.3)

        def forward(self, x):
            return self.norm(self.second(self.norm(self.first(x)).relu()))

    model = nn.Sequential(Twice(), nn.Flatten(), nn.Linear(8 * 16, 3))
    plain = copy.deepcopy(model)
    blocker = halfway.ForwardBlocker(model, "0", 0.5, selector=density(), reuse="replay")
    for _ in range(2):
        x = torch.randn(8, 3, 8, 8)
        model(blocker(x)).sum().backward()
        plain[0](x)
    assert blocker.stats.steps_replayed == 2
    torch.testing.assert_close(model[0].norm.running_mean, plain[0].norm.running_mean)
    torch.testing.assert_close(model[0].norm.running_var, plain[0].norm.running_var)
    assert model[0].norm.num_batches_tracked == 4
