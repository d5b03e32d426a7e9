"""Samples that see each other before the cut: what a value of the whole batch reaches is computed, never replayed.

Every step of every training here has the gradients of a plain copy on the retained samples. What lies before the
reduction is still replayed.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfway
from tests.helpers.apart import Net, normal_batches, train

# --- values of the whole batch that flow back into it ----------------------------------------------------------------


def log_mel(h):
    """Clamped to the batch's maximum minus a constant, as front ends for speech do."""
    return torch.maximum(h, h.amax() - 2.0)


def by_hand(h):
    """A hand-written BatchNorm."""
    return (h - h.mean(0, keepdim=True)) * torch.rsqrt(h.var(0, keepdim=True, unbiased=False) + 1e-5)


def capacity(h, limit=3):
    """Dense routing to 4 experts, each of which takes only the first samples that come to it."""
    chosen = (h[:, :4].argmax(1, keepdim=True) == torch.arange(4)).long()
    place = (chosen.cumsum(0) * chosen).sum(1)
    return h * (1 + (place <= limit).to(h.dtype).unsqueeze(1))


def gated(h):
    """An emergency brake: only outliers would ever release it."""
    return torch.where(h.abs().amax() > 100, h * 0.01, h * 2)


def kernel(h):
    return torch.softmax(-torch.cdist(h, h), 1) @ h


def written_out(h):
    extreme = torch.empty(1)
    torch.amax(h.detach().flatten(), 0, keepdim=True, out=extreme)
    return h / extreme


def written_in_place(h):
    scale = torch.ones(4)
    scale[1:3].copy_(h.detach().abs().amax())
    return h / scale.view(2, 2).max()


REDUCTIONS = {
    "divided by the largest value": lambda h: h / h.abs().amax(),
    "divided by the largest value, detached": lambda h: h / h.detach().abs().amax(),
    "divided by the largest value per feature": lambda h: h / h.detach().abs().amax(0),
    "clamped to the largest value minus a constant": log_mel,
    "clamped between quantiles": lambda h: h.clamp(torch.quantile(h.detach(), 0.1), torch.quantile(h.detach(), 0.9)),
    "divided by a quantile": lambda h: h / torch.quantile(h.abs(), 0.9),
    "less its median": lambda h: h - h.median(),
    "less its median per feature": lambda h: h - h.median(0).values,
    "divided by the smallest norm": lambda h: h / h.detach().norm(dim=1).min(),
    "divided by the third largest norm": lambda h: h / h.detach().norm(dim=1).topk(3).values[-1],
    "softmax over the batch": lambda h: h.softmax(0) * h,
    "logsumexp over the batch": lambda h: h - h.logsumexp(0),
    "normalised over the batch": lambda h: F.normalize(h, dim=0),
    "less its first sample": lambda h: h - h[:1],
    "less its last sample": lambda h: h - h[-1],
    "less its mean": lambda h: h - h.mean(0),
    "standardised by hand": by_hand,
    "standardised by var_mean": lambda h: (h - torch.var_mean(h, 0)[1]) / (1 + torch.var_mean(h, 0)[0]).sqrt(),
    "routed with a capacity": capacity,
    "routed with a capacity that is never exceeded": lambda h: capacity(h, 1000),
    "cumulative sum over the batch": lambda h: h + 0.1 * h.cumsum(0),
    "running maximum over the batch": lambda h: h / (1 + h.cummax(0).values.abs()),
    "a branch by where that stays dormant": gated,
    "a dormant clamp of infinities": lambda h: torch.where(h.isinf().any(), h.clamp(-1, 1), h),
    "a product over the batch": lambda h: h @ (h.T @ h) / len(h),
    "a product over the batch in einsum": lambda h: torch.einsum("nd,de->ne", h, torch.einsum("nd,ne->de", h, h)) / 9,
    "distances between samples": kernel,
    "an extreme through a view": lambda h: h / h.view(2, -1).t().detach().abs().amax(),
    "an extreme written to out=": written_out,
    "an extreme written in place, through views": written_in_place,
    "an extreme through .data": lambda h: h / h.data.abs().max(),
    "an extreme through foreach": lambda h: torch._foreach_div([h], [h.detach().abs().amax()])[0],
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize(("size", "ratio"), [(8, 0.5), (16, 0.3)])
def test_what_a_value_of_the_whole_batch_reaches_is_that_of_the_retained_samples(name, size, ratio):
    for seed in range(6):
        torch.manual_seed(seed)
        train(Net(REDUCTIONS[name]), normal_batches(6, size, 16, seed=seed), ratio).assert_right(name)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_value_of_the_whole_batch_rules_out_no_replay(name):
    outcome = train(Net(REDUCTIONS[name]), normal_batches(3, 16, 16), 0.3).assert_all_replayed()
    assert outcome.stats.operations_replayed == 3, "the layer before it is replayed"
    assert outcome.stats.operations_computed >= 3, "the layer behind it is computed"


@pytest.mark.parametrize(
    "name",
    [
        "divided by the largest value, detached",
        "clamped to the largest value minus a constant",
        "routed with a capacity",
    ],
)
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 30), marks=pytest.mark.slow)], ids=["8", "all"])
def test_no_training_of_thirty_is_wrong(name, seeds):
    """An extreme may lie among any rows: at each seed others are retained, and others were looked at before."""
    for seed in seeds:
        torch.manual_seed(seed)
        size, ratio = [(16, 0.3), (16, 0.5), (8, 0.3), (8, 0.5)][seed % 4]
        train(Net(REDUCTIONS[name]), normal_batches(33, size, 16, seed=seed), ratio).assert_right((name, seed))


@pytest.mark.parametrize("reuse", ["auto", "recompute"])
def test_a_scaled_batch_trains_as_always(reuse):
    outcome = train(Net(REDUCTIONS["divided by the largest value"]), normal_batches(34, 8, 16), reuse=reuse)
    outcome.assert_right()


DORMANT = {
    "where": gated,
    "product": lambda h: h * (2 - (h.abs().amax() > 100).to(h.dtype)),
    "clamp": lambda h: h / h.abs().amax().clamp(min=100),
    "any": lambda h: torch.where((h.norm(dim=1) > 100).any(), h / 7, h),
    "threshold": lambda h: h * F.threshold(h.abs().amax(), 100, 1.0),
}


@pytest.mark.parametrize("name", DORMANT)
@pytest.mark.parametrize("outlier_is_retained", [False, True])
def test_a_dormant_branch_that_awakes_is_right(name, outlier_is_retained):
    """From step 4 on there is an outlier in the batch. Pruned, it must not be felt; retained, it must."""
    batches = normal_batches(8, 8, 16)
    scores = torch.arange(8.0)
    scores[2] = 100.0 if outlier_is_retained else -1.0
    for x in batches[4:]:
        x[2] *= 1e4
    train(Net(DORMANT[name]), batches, scores=[scores] * 8, rate=0).assert_right()


class Later(nn.Module):
    """From its `start`-th step on the batch is scaled by its extreme, without any new expensive operation."""

    def __init__(self, start):
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.start = start

    def forward(self, h):
        self.step += 1
        return h / h.detach().abs().amax() if int(self.step) > self.start else h / 2.5


class ScaleBuffer(nn.Module):
    """The extreme goes through a buffer."""

    def __init__(self, moving=False):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.moving = moving

    def forward(self, h):
        extreme = h.detach().abs().amax()
        self.scale.lerp_(extreme, 0.3) if self.moving else self.scale.copy_(extreme)
        return h / self.scale


class PlainScale(nn.Module):
    """The same through a tensor that is registered nowhere."""

    def __init__(self):
        super().__init__()
        self.scale = [torch.ones(1)]

    def forward(self, h):
        self.scale[0][0] = h.detach().abs().amax()
        return h / self.scale[0]


def fake_quantize(fused):
    from torch.ao import quantization as q

    kind = q.FusedMovingAvgObsFakeQuantize if fused else q.FakeQuantize
    return kind(observer=q.MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8)


MODULES = {
    "scaling that begins in a later step": lambda: Later(5),
    "scaling that begins in the second step": lambda: Later(1),
    "an extreme in a buffer": ScaleBuffer,
    "a moving extreme in a buffer": lambda: ScaleBuffer(moving=True),
    "an extreme in a plain tensor": PlainScale,
    "an observer for quantisation": lambda: fake_quantize(False),
    "a fused observer for quantisation": lambda: fake_quantize(True),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(("size", "ratio"), [(16, 0.3), (8, 0.5)])
def test_values_of_the_whole_batch_in_the_state_of_a_module(name, size, ratio):
    for seed in range(3):
        torch.manual_seed(seed)
        model = Net(MODULES[name]())
        outcome = train(model, normal_batches(12, size, 16, seed=seed), ratio).assert_right(name)
        assert outcome.stats.operations_replayed > 0


def test_an_observer_before_a_convolution_sees_the_retained_samples():
    """As quantisation-aware training has it: observed input, observed weights."""
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), fake_quantize(True), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 3)
        )
        outcome = train(model, normal_batches(8, 8, 3, 8, 8, seed=seed), 0.4, at="2").assert_right()
        assert outcome.stats.operations_replayed > 0


def test_an_embedding_with_a_largest_norm_is_right():
    """Looking a row up shortens it, so only the rows of the retained samples may be."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(200, 16, max_norm=1.0)
            self.cut, self.b, self.head = nn.Identity(), nn.Linear(16, 16), nn.Linear(16, 3)

        def forward(self, x):
            return self.head(self.cut(self.b(self.embedding(x).mean(1))))

    model = Words()
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 200, (8, 4), generator=generator) for _ in range(8)]
    # The reference shortens its own weights in forward: with equal ones before each step, gradients tell both.
    train(model, batches).assert_right()
    pruned = model.embedding.weight.detach().norm(dim=1)
    assert (pruned > 1.01).any(), "nobody looked up by a pruned sample alone is shortened"


# --- mixing that keeps the sample axis: computed or recomputed, right either way -------------------------------------


def pairs(h):
    """Neighbours are averaged."""
    return h + h.view(-1, 2, h.shape[1]).mean(1).repeat_interleave(2, 0)


def repeated_wrongly(h):
    """Windows of one sample meet the query of another: a repeat where an interleaved one is needed."""
    query = h[:, :4].repeat(4, 1)
    windows = h.view(-1, 4)
    return (windows * torch.softmax(query * windows, 1)).view_as(h) + h


KEEP_THE_AXIS = {
    "roll": lambda h: h + h.roll(1, 0),
    "flip": lambda h: h + h.flip(0),
    "reversed index": lambda h: h + h[torch.arange(len(h) - 1, -1, -1)],
    "sorted": lambda h: h + h.sort(0).values,
    "sorted by norm": lambda h: h + h[h.detach().norm(dim=1).argsort()],
    "neighbours averaged": pairs,
    "windows paired with other samples": repeated_wrongly,
    "routed by one_hot, which reads the largest index": lambda h: (
        h * F.one_hot(h[:, :4].argmax(1), 4).cumsum(0).repeat(1, 4)
    ),
    "one layer_norm over everything": lambda h: F.layer_norm(h, h.shape),
    "attention over the batch": lambda h: h + F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
    "convolution over the batch": lambda h: h + F.conv1d(h.T[None], torch.ones(16, 16, 3) / 48, padding=1)[0].T,
    "pooled over the batch": lambda h: h + F.avg_pool1d(h.T[None], 3, 1, 1)[0].T,
    "largest neighbour": lambda h: h + F.max_pool1d(h.T[None], 3, 1, 1)[0].T,
    "triangular sum": lambda h: h + 0.1 * (torch.ones(len(h), len(h)).tril() @ h),
    "differences": lambda h: torch.cat([h[:1], h.diff(dim=0)]),
    "numbered samples": lambda h: h * (1 + torch.arange(len(h)).view(-1, 1) / len(h)),
    "every other sample": lambda h: h * (torch.arange(len(h)) % 2).view(-1, 1),
    "a first half and a second one": lambda h: torch.cat([h[: len(h) // 2] * 2, h[len(h) // 2 :]]),
    "scattered": lambda h: h + torch.zeros_like(h).index_add(0, torch.arange(len(h)) // 2, h),
}


@pytest.mark.parametrize("name", KEEP_THE_AXIS)
@pytest.mark.parametrize("size", [4, 8, 12, 16])
def test_samples_that_meet_along_the_batch_are_right(name, size):
    for seed in range(2):
        torch.manual_seed(seed)
        train(Net(KEEP_THE_AXIS[name]), normal_batches(6, size, 16, seed=seed)).assert_right(name)


def test_a_shuffled_batch_is_recomputed_and_right():
    outcome = train(Net(lambda h: h[torch.randperm(len(h))]), normal_batches(4, 8, 16), draws=True).assert_right()
    assert not any(outcome.replayed)


# --- half precision --------------------------------------------------------------------------------------------------


class ByHand2d(nn.Module):
    def forward(self, x):
        mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, unbiased=False)
        return (x - mean) * torch.rsqrt(var + 1e-5)


class Centred(nn.Module):
    def forward(self, x):
        return x - 0.05 * x.mean(0, keepdim=True)


class Extreme(nn.Module):
    def forward(self, x):
        return x / x.detach().abs().amax()


def half_precision_net(mixing):
    shallow = [nn.Conv2d(3, 8, 3), mixing(), nn.ReLU(), nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*shallow, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def autocast_gradients(model, x, y, dtype):
    model.zero_grad()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("mixing", [ByHand2d, Centred, Extreme])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "side"), [(16, 8), pytest.param(128, 32, marks=pytest.mark.slow)])
def test_mixing_is_seen_in_half_precision_too(mixing, dtype, size, side):
    """Rounding hides what samples share. How much of a difference is rounding, the same rows in another order tell."""
    model = half_precision_net(mixing)
    blocker = halfway.ForwardBlocker(model, "3", 0.5, selector=halfway.Density(num_centroids=4))
    for _ in range(4):
        x = torch.randn(size, 3, side, side) * (1 + torch.rand(size, 1, 1, 1))
        y = torch.randint(0, 5, (size,))
        plain = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="halfway")
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                x, y = blocker(x, y)
            found = autocast_gradients(model, x, y, dtype)
        expected = autocast_gradients(plain, x, y, dtype)
        rounding = (autocast_gradients(plain, x.flip(0), y.flip(0), dtype) - expected).norm()
        assert (found - expected).norm() <= 2 * rounding + 1e-5 * expected.norm(), blocker.stats
    blocker.remove()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_mixing_in_half_precision_rules_out_no_replay(dtype):
    model = half_precision_net(ByHand2d)
    blocker = halfway.ForwardBlocker(model, "3", 0.5, selector=halfway.Density(num_centroids=4), reuse="replay")
    x, y = torch.randn(16, 3, 8, 8), torch.randint(0, 5, (16,))
    for _ in range(2):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            retained = blocker(x, y)
        autocast_gradients(model, *retained, dtype)
    assert blocker.stats.steps_replayed == 2
    assert blocker.stats.operations_replayed == blocker.stats.operations_computed == 2
