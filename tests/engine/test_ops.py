"""Operations are known for what they are, also those that only a CUDA device would run."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from halfway.engine import ops

aten = torch.ops.aten
OLD = tuple(int(v) for v in torch.__version__.split(".")[:2]) < (2, 14)


class Kinds(TorchDispatchMode):
    """Notes the kind of every operation."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func)] = ops.traits(func).kind
        return func(*args, **(kwargs or {}))


def kinds_on_cuda(function):
    """What `function` dispatches on CUDA tensors, without having a CUDA device."""
    with FakeTensorMode(), Kinds() as kinds:
        function(lambda *shape: torch.empty(*shape, device="cuda", requires_grad=True))
    return kinds.seen


@pytest.mark.skipif(
    not torch.backends.cuda.is_built() or OLD,
    reason="this build knows nothing of CUDA, or (before 2.14) asks a driver about it",
)
@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda new: F.conv2d(new(2, 3, 8, 8), new(4, 3, 3, 3)), "expensive"),
        (lambda new: F.conv_transpose2d(new(2, 3, 8, 8), new(3, 4, 3, 3)), "expensive"),
        (lambda new: F.linear(new(2, 5, 3), new(4, 3), new(4)), "expensive"),
        (lambda new: new(2, 5, 3) @ new(2, 3, 4), "expensive"),
        (lambda new: F.scaled_dot_product_attention(new(2, 2, 8, 16), new(2, 2, 8, 16), new(2, 2, 8, 16)), "expensive"),
        (lambda new: F.batch_norm(new(2, 3, 4, 4), None, None, new(3), new(3), training=True), "batch_norm"),
        (lambda new: F.dropout(new(2, 3), 0.5), "random"),
        (lambda new: new(2, 1, 1).detach().bernoulli_(0.5), "random"),
        (lambda new: F.max_pool2d(new(2, 3, 8, 8), 2), "expensive"),
    ],
)
def test_what_a_cuda_device_would_run_is_known(function, kind):
    assert kind in kinds_on_cuda(function).values()


def test_reading_a_value_on_the_host_is_noticed():
    with Kinds() as kinds:
        bool(torch.ones(1) > 0)
        torch.equal(torch.ones(1), torch.ones(1))
    assert kinds.seen["aten._local_scalar_dense.default"] == kinds.seen["aten.equal.default"] == "host"


@pytest.mark.parametrize(
    ("func", "written"),
    [
        (aten.relu_.default, (0,)),
        (aten.add.Tensor, ()),
        (aten.add.out, ("out",)),
        (aten.native_batch_norm.default, (3, 4)),
        (aten.bernoulli_.float, (0,)),
    ],
)
def test_writes_are_known_also_where_the_schema_hides_them(func, written):
    assert ops.traits(func).written == written


@pytest.mark.parametrize("func", [aten.randperm.default, aten.nonzero.default, aten.mkldnn_rnn_layer.default])
def test_operations_that_rule_out_a_replay_say_why(func):
    assert ops.traits(func).refusal


def test_indexing_rules_out_a_replay_only_with_a_mask():
    x = torch.ones(3)
    assert ops.excused(aten.index.Tensor, (x, [torch.tensor([0, 1])]))
    assert not ops.excused(aten.index.Tensor, (x, [x > 0]))
