"""Every random draw before the cut is the sample's own, and every value that is read on the host is compared.

Draws: whether they return what they draw, write it to `out=`, in place or to an argument in the middle, a replayed step
has the gradients of the same draws on all samples, with the output of the cut indexed.

Reads: however a program gets hold of a value, where all samples and the retained ones give the same one the step is
replayed, and where they do not it is recomputed.
"""

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.apart import Net, normal_batches, train

# --- draws -----------------------------------------------------------------------------------------------------------


def written(draw):
    """`draw(h, out)` fills `out`."""

    def run(h):
        out = torch.empty_like(h)
        draw(h.detach(), out)
        return h + out

    return run


def written_to_a_part(h):
    """The draw goes to a view of a larger tensor."""
    both = torch.zeros(len(h), 2, h.shape[1])
    torch.rand(h.shape, out=both[:, 1])
    return h + both.sum(1)


def per_sample(h):
    out = torch.empty(len(h), 1)
    torch.rand(len(h), 1, out=out)
    return h * (out > 0.3)


def noise_by_hand(h):
    """What nn.RReLU does inside: the slopes are written to an argument in the middle."""
    noise = torch.empty_like(h)
    return torch._C._nn.rrelu_with_noise(h, noise, 0.1, 0.9, True) * noise.clamp(max=1)


DRAWS = {
    "rrelu": lambda h: F.rrelu(h, 0.1, 0.9, training=True),
    "rrelu, steep": lambda h: F.rrelu(h, -3.0, 3.0, training=True),
    "rrelu in place": lambda h: F.rrelu_(h * 1.0, 0.1, 0.9, training=True),
    "rrelu with noise": noise_by_hand,
    "rand": lambda h: h + torch.rand(h.shape),
    "rand(out=)": written(lambda h, out: torch.rand(h.shape, out=out)),
    "rand(out=), a part": written_to_a_part,
    "rand(out=), per sample": per_sample,
    "randn(out=)": written(lambda h, out: torch.randn(h.shape, out=out)),
    "bernoulli(out=)": written(lambda h, out: torch.bernoulli(h.sigmoid(), out=out)),
    "normal(out=)": written(lambda h, out: torch.normal(h, 0.5, out=out)),
    "normal of a size(out=)": written(lambda h, out: torch.normal(0.0, 0.5, h.shape, out=out)),
    "normal of two tensors(out=)": written(lambda h, out: torch.normal(h, h.abs(), out=out)),
    "randint(out=)": lambda h: h * torch.randint(1, 5, h.shape, out=torch.empty(h.shape, dtype=torch.int64)),
    "multinomial(out=)": lambda h: (
        h * torch.multinomial(h.detach().softmax(1), 1, out=torch.empty(len(h), 1, dtype=torch.int64))
    ),
    "multinomial": lambda h: h.gather(1, torch.multinomial(h.detach().softmax(1), 16)),
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(0.7),
    "bernoulli_ by a tensor": lambda h: h * torch.empty_like(h).bernoulli_(h.detach().sigmoid()),
    "uniform_": lambda h: h * torch.empty_like(h).uniform_(0.5, 1.5),
    "exponential_": lambda h: h - torch.empty_like(h).exponential_().log(),
    "log_normal_": lambda h: h * torch.empty_like(h).log_normal_(0, 0.3),
    "cauchy_, clamped": lambda h: h + torch.empty_like(h).cauchy_().clamp(-1, 1),
    "geometric_": lambda h: h / torch.empty_like(h).geometric_(0.5),
    "random_": lambda h: h * torch.empty_like(h).random_(0, 3),
    "normal_ in place of features": lambda h: h + (h.detach() * 0).normal_(),
    "poisson": lambda h: h * torch.poisson(h.detach().abs()),
    "gumbel softmax": lambda h: F.gumbel_softmax(h, hard=True) * h,
    "dropout": lambda h: F.dropout(h, 0.3),
    "dropout in place": lambda h: F.dropout(h * 1.0, 0.3, inplace=True),
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.3, training=True),
    "alpha dropout in place": lambda h: F.alpha_dropout(h * 1.0, 0.3, training=True, inplace=True),
    "feature dropout": lambda h: F.dropout1d(h.view(-1, 4, 4), 0.3).flatten(1),
    "feature dropout in place": lambda h: F.dropout2d(h.view(-1, 4, 2, 2) * 1.0, 0.3, inplace=True).flatten(1),
    "feature alpha dropout": lambda h: F.feature_alpha_dropout(h.view(-1, 4, 4), 0.3, training=True).flatten(1),
    "fractional max pooling": lambda h: (
        F.fractional_max_pool2d(h.view(-1, 1, 4, 4), 2, output_size=2).flatten(1).repeat(1, 4)
    ),
    "dropout in attention": lambda h: F.scaled_dot_product_attention(*[h.view(-1, 4, 4)] * 3, dropout_p=0.3).flatten(1),
    "a sample of a distribution": lambda h: torch.distributions.Normal(h, h.abs() + 1).rsample(),
    "a mixture of both": lambda h: F.dropout(F.rrelu(h, training=True), 0.2) + written_to_a_part(h),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("size", [8, 32])
def test_draws_are_those_of_all_samples(name, size):
    for seed in range(2):
        torch.manual_seed(seed)
        train(Net(DRAWS[name]), normal_batches(6, size, 16, seed=seed), draws=True, rate=0.01).assert_right(name)


MAY_RECOMPUTE = ("dropout in attention", "fractional max pooling")


@pytest.mark.parametrize("name", [n for n in DRAWS if n not in MAY_RECOMPUTE])
def test_draws_rule_out_no_replay(name):
    outcome = train(Net(DRAWS[name]), normal_batches(3, 32, 16), draws=True, rate=0.01).assert_all_replayed()
    assert outcome.stats.operations_replayed > 0


def test_rrelu_in_a_convolutional_net_trains():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.RReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(144, 3))
    outcome = train(model, normal_batches(8, 8, 3, 10, 10), at="2", draws=True).assert_right()
    assert outcome.stats.steps_replayed == 8


# --- values that are read on the host --------------------------------------------------------------------------------


def saved(t):
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file).view(-1)[0].item()


def applied(t):
    found = []
    t.detach().clone().apply_(lambda v: found.append(v) or v)
    return found[0]


# From a detached tensor of one element, or of several equal ones, to its value.
READS = {
    "bool": bool,
    "float": float,
    "int": int,
    "item": lambda t: t.item(),
    "tolist": lambda t: t.tolist(),
    "tolist of several": lambda t: t.repeat(3).tolist()[1],
    "detach().cpu().tolist": lambda t: t.detach().cpu().tolist(),
    "numpy": lambda t: t.numpy().max(),
    "numpy(force)": lambda t: t.numpy(force=True).item(),
    "cpu().numpy": lambda t: t.cpu().numpy().sum(),
    "np.asarray": lambda t: np.asarray(t).item(),
    "np.array": lambda t: np.array(t).tolist(),
    "np.float64": lambda t: np.float64(t),
    "a function of NumPy": lambda t: np.mean(t.repeat(2).unbind()),
    "__array__": lambda t: t.__array__().item(),
    "np.from_dlpack": lambda t: np.from_dlpack(t).max(),
    "torch.from_dlpack": lambda t: torch.from_dlpack(t).tolist(),
    "to_dlpack": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)).numpy().max(),
    "is_nonzero": lambda t: t.is_nonzero(),
    "equal": lambda t: torch.equal(t, torch.ones_like(t)),
    "allclose": lambda t: torch.allclose(t, torch.ones_like(t)),
    "in": lambda t: 1 in t,
    "any": lambda t: any(t.repeat(2)),
    "max": lambda t: float(max(t.repeat(2))),
    "iteration": lambda t: max(v.item() for v in t.repeat(2)),
    "math.floor": math.floor,
    "as an index": lambda t: [0, 1][t.long()],
    "range": lambda t: len(range(t.long())),
    "format": lambda t: float(f"{t.item():.1f}"),
    "repr": lambda t: "1." in repr(t),
    "str": lambda t: "1." in str(t),
    "the format of a scalar": lambda t: float(f"{t:.1f}"),
    "storage": lambda t: t.untyped_storage().tolist() != [0, 0, 0, 0],
    "bytes": lambda t: bytes(t.untyped_storage()) != bytes(4),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)).item(),
    "torch.save": saved,
    "deepcopy": lambda t: copy.deepcopy(t).item(),
    "apply_": applied,
}


def branch(read, value):
    """A branch on `value(h)` as `read` gives it, that no sequence of operations shows."""

    def run(h):
        with torch.no_grad():
            first = bool(read(value(h)))
        return h * 2 if first else h * 3

    return run


def more_positive(h):
    """0 or 1, as a number: often the same for all samples and for the retained ones, sometimes not."""
    return (h.detach()[:, 0].mean() > 0).float()


@pytest.mark.parametrize("name", READS)
def test_a_branch_on_a_value_of_the_batch_is_right_in_every_step(name):
    """Replayed where all samples and the retained ones take the same branch, recomputed where not."""
    model = Net(branch(READS[name], more_positive))
    model.a.bias.data.zero_()
    batches = normal_batches(34, 8, 16)
    outcome = train(model, batches, rate=0).assert_right()
    agree = [
        bool(more_positive(model.a(x)) == more_positive(model.a(x[rows])))
        for x, rows in zip(batches, outcome.rows, strict=True)
    ]
    assert 5 < sum(agree) < 34
    assert outcome.replayed == agree, outcome.stats.recompute_reasons
    assert set(outcome.stats.recompute_reasons) == {"the shallow part branches on values of the batch"}


@pytest.mark.parametrize("name", READS)
def test_a_value_that_is_the_same_for_all_samples_rules_out_no_replay(name):
    model = Net(branch(READS[name], lambda h: (h.detach() == h.detach()).all().float()))
    outcome = train(model, normal_batches(4, 8, 16)).assert_right().assert_all_replayed()
    assert outcome.stats.operations_replayed == 8
    assert outcome.stats.operations_computed == 0


SCALES = {
    "item": lambda t: t.item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: float(t.numpy()),
    "np.asarray": lambda t: float(np.asarray(t)),
    "np.from_dlpack": lambda t: float(np.from_dlpack(t)),
    "cpu().numpy": lambda t: float(t.cpu().numpy()),
    "a tensor from NumPy": lambda t: torch.from_numpy(t.numpy().copy()),
    "a tensor made of a list": lambda t: torch.tensor(t.tolist()),
    "a tensor that shares memory": lambda t: torch.from_dlpack(t),
    "torch.as_tensor of an array": lambda t: torch.as_tensor(np.asarray(t)),
}


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_that_goes_through_the_host_is_right(name):
    """What comes back from the host is a value of the batch, without any branch."""
    for seed in range(4):
        torch.manual_seed(seed)
        model = Net(lambda h: h / SCALES[name](h.detach().abs().amax()))
        train(model, normal_batches(8, 8, 16, seed=seed)).assert_right(name)


class ReadsPerFeature(nn.Module):
    """Reads one number per feature, uses the first."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, h):
        return h * 2 if self.read(h.detach().mean(0)) > 0 else h * 3


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.tolist()[0],
        lambda t: t.numpy()[0],
        lambda t: np.asarray(t)[0],
        lambda t: t.cpu().numpy()[0],
        lambda t: np.from_dlpack(t)[0],
        lambda t: next(iter(t)),
        lambda t: t[0],
    ],
)
def test_many_values_read_at_once_are_right(read):
    train(Net(ReadsPerFeature(read)), normal_batches(34, 8, 16)).assert_right()


def test_reading_a_parameter_rules_out_no_replay():
    model = Net(
        lambda h: h * (2 if sum(model.a.bias.detach().tolist()) > 0 else 3) * float(model.b.bias.detach().numpy().max())
    )
    train(model, normal_batches(4, 8, 16)).assert_right().assert_all_replayed()


@pytest.mark.parametrize("read", [lambda t: t.tolist(), lambda t: t.numpy(), lambda t: np.asarray(t)])
def test_reading_values_of_each_sample_is_right(read):
    """Which only differ because there are fewer of them."""
    model = Net(lambda h: h * torch.as_tensor(np.array(read(h.detach().amax(1))), dtype=h.dtype).view(-1, 1))
    train(model, normal_batches(6, 8, 16)).assert_right()


def test_writing_to_an_array_of_the_features_is_right():
    """On a CPU an array shares its memory: written to after it was read."""

    def run(h):
        out = h * 1.0
        out.detach().numpy()[:, 0] *= 2
        return out

    train(Net(run), normal_batches(6, 8, 16)).assert_right()
