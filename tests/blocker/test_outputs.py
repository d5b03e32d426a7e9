"""Blocking at the model's output: the forward pass of all samples, the backward pass of the retained ones alone."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfway import ForwardBlocker, Schedule, Selection, Selector
from halfway.engine.flops import FlopCounter
from halfway.selectors import Loss

from ..helpers import processes

OUTPUT = "blocked at the output"


class Net(nn.Module):
    """Convolutions with a skip, GroupNorm, dropout and a linear head."""

    def __init__(self, norm=lambda c: nn.GroupNorm(2, c), dropout=0.0, as_dict=False):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = norm(8)
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 5)
        self.as_dict = as_dict

    def forward(self, x):
        h = F.relu(self.norm(self.stem(x)))
        h = self.dropout(h + self.body(h)).mean((2, 3))
        logits = self.head(h)
        return {"out": logits, "aux": logits.mean(1)} if self.as_dict else logits


def batch(size=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(5, (size,), generator=generator)


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def logits_of(outputs):
    return outputs["out"] if isinstance(outputs, dict) else outputs


@pytest.mark.parametrize("as_dict", [False, True])
def test_the_largest_losses_stay_and_gradients_equal_those_of_training_on_them(as_dict):
    torch.manual_seed(0)
    model = Net(as_dict=as_dict)
    plain = copy.deepcopy(model)
    x, y = batch()
    losses = F.cross_entropy(logits_of(plain(x)), y, reduction="none")
    blocker = ForwardBlocker(model, None, 0.5, selector="loss", reuse="replay")
    part, part_y = blocker(x, y)
    largest = losses.topk(6).indices.sort().values
    assert torch.equal(blocker.last.indices, largest)
    assert torch.allclose(blocker.last.importance, losses, atol=1e-6)
    F.cross_entropy(logits_of(model(part)), part_y).backward()
    F.cross_entropy(logits_of(plain(x[largest])), y[largest]).backward()
    assert blocker.stats.steps_replayed == 1
    for mine, theirs in zip(gradients(model), gradients(plain), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_the_forward_pass_runs_once_and_the_price_is_what_stats_say():
    model = Net()
    x, y = batch(16)
    with FlopCounter() as full:
        F.cross_entropy(model(x), y).backward()
    blocker = ForwardBlocker(model, None, 0.5, selector="loss")
    for _ in range(2):  # the first step also validates and rehearses
        before = blocker.stats.relative_flops * blocker.stats.samples_seen
        with FlopCounter() as blocked:
            part, part_y = blocker(x, y)
            F.cross_entropy(model(part), part_y).backward()
    spent = (blocker.stats.relative_flops * blocker.stats.samples_seen - before) / 16
    assert blocked.total / full.total == pytest.approx(spent, rel=1e-6)
    assert 0.6 < spent < 0.75  # forward of all (about a third) and backward of half


def test_random_draws_of_the_forward_pass_are_those_of_the_probe():
    torch.manual_seed(0)
    model = Net(dropout=0.5)
    reference = copy.deepcopy(model)
    x, y = batch()
    blocker = ForwardBlocker(model, None, 0.5, selector="loss", reuse="replay")
    torch.manual_seed(1)
    whole = reference(x)
    torch.manual_seed(1)
    part, _ = blocker(x, y)
    assert torch.allclose(model(part), whole[blocker.last.indices], atol=1e-6)


def test_batch_norm_uses_the_whole_batch_and_moves_once():
    torch.manual_seed(0)
    model = Net(norm=nn.BatchNorm2d)
    reference = copy.deepcopy(model)
    x, y = batch()
    blocker = ForwardBlocker(model, None, 0.5, selector="loss", reuse="replay")
    part, _ = blocker(x, y)
    out, whole = model(part), reference(x)
    assert torch.allclose(out, whole[blocker.last.indices], atol=1e-5)
    assert torch.allclose(model.norm.running_mean, reference.norm.running_mean, atol=1e-6)
    assert model.norm.num_batches_tracked == 1


def test_ratio_zero_is_plain_training_bit_for_bit():
    torch.manual_seed(0)
    model = Net(norm=nn.BatchNorm2d, dropout=0.3)
    plain = copy.deepcopy(model)
    blocker = ForwardBlocker(model, None, 0.0, selector="loss")
    for trained, cut in ((model, blocker), (plain, lambda *b: b)):
        torch.manual_seed(2)
        optimizer = torch.optim.SGD(trained.parameters(), 0.1, momentum=0.9)
        for step in range(4):
            x, y = cut(*batch(seed=step))
            F.cross_entropy(trained(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_recompute_is_training_on_the_retained_samples_alone_bit_for_bit():
    torch.manual_seed(0)
    model = Net(norm=nn.BatchNorm2d, dropout=0.3)
    plain = copy.deepcopy(model)
    blocker = ForwardBlocker(model, None, 0.5, selector="loss", reuse="recompute")
    x, y = batch()
    torch.manual_seed(3)
    part, part_y = blocker(x, y)
    F.cross_entropy(model(part), part_y).backward()
    torch.manual_seed(3)
    F.cross_entropy(plain(x[blocker.last.indices]), part_y).backward()
    for mine, theirs in zip(gradients(model), gradients(plain), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(model.norm.running_mean, plain.norm.running_mean)


def test_bfloat16_is_replayed(feature):
    model = Net()
    x, y = batch()
    blocker = ForwardBlocker(model, None, 0.5, selector="loss")
    for _ in range(3):
        part, part_y = blocker(x, y)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(part), part_y)
        loss.backward()
    assert blocker.stats.steps_replayed == 2  # the first call showed that it runs under autocast
    feature(OUTPUT, "autocast, bfloat16", blocker.stats)


class Watching(Selector):
    """Looks at what enters the head."""

    name = "watching"
    needs = "outputs"
    wants_targets = "required"

    def __init__(self):
        self.shown = []

    def watches(self, root):
        return root.head

    def select(self, candidates, count):
        self.shown.append(candidates)
        return Selection(torch.arange(count))

    def learn(self, candidates, retained):
        self.learned = (candidates, retained)


def test_a_selector_sees_outputs_targets_and_what_enters_the_module_it_watches():
    model = Net()
    x, y = batch()
    selector = Watching()
    blocker = ForwardBlocker(model, None, 0.5, selector=selector)
    blocker(x, y)
    seen = selector.shown[0]
    assert torch.allclose(seen.outputs, model.head(seen.watched), atol=1e-6)
    assert seen.watched.shape == (12, 8)
    assert seen.targets is y
    assert not seen.outputs.requires_grad


def test_before_the_window_it_learns_from_the_models_own_call():
    model = Net()
    x, y = batch()
    selector = Watching()
    blocker = ForwardBlocker(model, None, 0.5, selector=selector, schedule=Schedule(1))
    blocker.set_epoch(0)
    assert blocker(x, y)[0] is x
    out = model(x)
    assert torch.equal(selector.learned[0].outputs, out)
    assert selector.learned[1] is None
    assert not selector.shown


def test_targets_are_found_by_position_name_or_where_one_says():
    model = Net()
    x, y = batch()
    for selector, call in (
        (Loss(target=2), lambda b: b(x, x, y)),
        (Loss(), lambda b: b(x=x, labels=y)),
        (Loss(target="mine"), lambda b: b(x=x, mine=y)),
        (Loss(), lambda b: b(x, y)),
    ):
        with ForwardBlocker(model, None, 0.5, selector=selector) as blocker:
            call(blocker)
            assert torch.allclose(
                blocker.last.importance, F.cross_entropy(model(x), y, reduction="none").detach(), atol=1e-6
            )


def test_what_is_missing_is_said_at_the_first_batch():
    model = Net()
    x, y = batch()
    with ForwardBlocker(model, None, 0.5, selector="loss", schedule=Schedule(5)) as blocker:
        blocker.set_epoch(0)
        with pytest.raises(ValueError, match="looks at targets, but finds none"):
            blocker(x)
    with (
        ForwardBlocker(model, None, 0.5, selector=Loss(target="y")) as blocker,
        pytest.raises(ValueError, match="'y' are not in the batch"),
    ):
        blocker(x, y)
    with (
        ForwardBlocker(model, None, 0.5, selector=Loss(loss_fn=F.cross_entropy)) as blocker,
        pytest.raises(ValueError, match=r"one loss per sample.*reduction='none'"),
    ):
        blocker(x, y)


def test_a_model_without_rows_in_its_output_is_refused():
    class Scalar(Net):
        def forward(self, x):
            return super().forward(x).mean()

    x, y = batch()
    blocker = ForwardBlocker(Scalar(), None, 0.5, selector="loss")
    with pytest.raises(TypeError, match="one per sample"):
        blocker(x, y)


def _train(rank):
    torch.manual_seed(0)
    model = Net(norm=nn.BatchNorm2d)
    ddp = DistributedDataParallel(model)
    blocker = ForwardBlocker(ddp, None, 0.5, selector="loss", reuse="replay")
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(3):
        x, y = blocker(*batch(seed=10 * step + rank))
        F.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return blocker.stats, [p.detach() for p in model.parameters()]


def test_two_processes_replay_and_stay_together(feature):
    (stats, one), (_, other) = processes.run(2, _train)
    assert stats.steps_replayed == 3
    feature(OUTPUT, "DDP, 2 processes", stats)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["resnet18", "deeplabv3_resnet50", "swin_t", "mobilenet_v3_small"])
def test_real_models_are_replayed_whole(name, feature):
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    if name == "deeplabv3_resnet50":
        model = models.segmentation.deeplabv3_resnet50(weights_backbone=None, num_classes=4, aux_loss=True)
        x, y = torch.randn(6, 3, 40, 40), torch.randint(4, (6, 40, 40))
        y[0, :5] = 255
    else:
        model = models.get_model(name, num_classes=4)
        x, y = torch.randn(6, 3, 64, 64), torch.randint(4, (6,))
    blocker = ForwardBlocker(model, None, 0.5, selector="loss", reuse="replay")
    part, part_y = blocker(x, y)
    out = logits_of(model(part))
    F.cross_entropy(out, part_y, ignore_index=255).backward()
    assert blocker.stats.steps_replayed == 1
    feature(OUTPUT, name, blocker.stats)
    assert len(out) == 3
    losses = Loss().losses(_Given(out.detach(), part_y))
    assert torch.allclose(losses, blocker.last.importance[blocker.last.indices], rtol=1e-3, atol=1e-4)


class _Given:
    def __init__(self, outputs, targets):
        self.outputs, self.targets, self.size = outputs, targets, len(targets)
