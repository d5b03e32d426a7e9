"""The replay on real models: exact gradients, exact buffers, nothing stale, nothing kept alive."""

import contextlib
import copy
import gc
import random
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import halfway
from tests.helpers.reference import FullBatchNorm


def scalar(output):
    """A loss of whatever a model returns."""
    if isinstance(output, torch.Tensor):
        return output.float().square().mean()
    if hasattr(output, "values"):
        return sum(scalar(o) for o in output.values() if o is not None)
    return sum(scalar(o) for o in output)


def gradients(model, *args, **kwargs):
    model.zero_grad()
    scalar(model(*args, **kwargs)).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def relative_difference(found, expected):
    assert found.keys() == expected.keys()
    scale = max(g.norm() for g in expected.values())
    return max(((found[n] - g).norm() / (g.norm() + 1e-3 * scale)).item() for n, g in expected.items())


def density(**kwargs):
    return halfway.Density(num_centroids=4, **kwargs)


def vision():
    return pytest.importorskip("torchvision").models


def timm_model(name, **kwargs):
    return pytest.importorskip("timm").create_model(name, **kwargs)


def unet():
    smp = pytest.importorskip("segmentation_models_pytorch")
    return smp.Unet("resnet18", encoder_weights=None, classes=3)


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False)


IMAGES = {
    "resnet18": (lambda: vision().resnet18(), "layer1", 32),
    "resnet50": (lambda: vision().resnet50(), "layer2", 32),
    "vgg11": (lambda: vision().vgg11().features, "7", 32),
    "squeezenet": (lambda: vision().squeezenet1_0(), "features.5", 64),
    "densenet121": (lambda: vision().densenet121(), "features.denseblock1", 32),
    "mobilenet_v3": (lambda: vision().mobilenet_v3_small(), "features.3", 64),
    "efficientnet_b0": (lambda: vision().efficientnet_b0(), "features.2", 64),
    "convnext": (lambda: timm_model("convnext_atto"), "stages.1", 64),
    "torchvision_swin": (lambda: vision().swin_t(), "features.1", 64),
    "timm_swin": (lambda: timm_model("swin_tiny_patch4_window7_224", img_size=56), "layers.0", 56),
    "vit": (lambda: timm_model("vit_tiny_patch16_224", img_size=64), "blocks.3", 64),
    "beit": (lambda: timm_model("beit_base_patch16_224", img_size=64, depth=3), "blocks.0", 64),
    "deeplab": (
        lambda: vision().segmentation.deeplabv3_resnet50(
            weights=None, weights_backbone=None, aux_loss=True, num_classes=3
        ),
        "backbone.layer3",
        64,
    ),
    "unet": (unet, "encoder.layer2", 32),
}


def freeze_batch_norm(model):
    """Without training-mode BatchNorm, and without dropout, training on the retained samples is the exact reference."""
    for module in model.modules():
        draws = isinstance(module, nn.Dropout) or type(module).__name__ in ("StochasticDepth", "DropPath")
        if draws or isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


@pytest.mark.parametrize("name", IMAGES)
def test_replayed_gradients_are_those_of_the_retained_samples(name, feature):
    build, at, size = IMAGES[name]
    model = freeze_batch_norm(build().train())
    x = torch.randn(6, 3, size, size)
    blocker = halfway.ForwardBlocker(model, at, 0.5, selector=density(), reuse="replay")
    for _ in range(2):
        retained = blocker(x)
        found = gradients(model, retained)
    assert blocker.stats.steps_replayed == 2
    assert blocker.stats.operations_replayed > 0
    assert blocker.stats.operations_computed == 0
    feature("models", f"{name}, cut at `{at}`", blocker.stats)
    blocker.remove()
    assert relative_difference(found, gradients(model, x[blocker.last.indices])) < 1e-5


def test_bert_called_with_keywords_replays(feature):
    model = bert().train()
    batch = {"input_ids": torch.randint(0, 50, (6, 7)), "attention_mask": torch.ones(6, 7, dtype=torch.int64)}
    blocker = halfway.ForwardBlocker(model, "encoder.layer.0.output", 0.5, selector=density(), reuse="replay")
    retained = blocker(**batch)
    found = gradients(model, **retained)
    assert blocker.stats.steps_replayed == 1
    feature("models", "BERT called with keywords, cut at `encoder.layer.0.output`", blocker.stats)
    blocker.remove()
    assert relative_difference(found, gradients(model, **{k: v[blocker.last.indices] for k, v in batch.items()})) < 1e-5


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


def small_net():
    shallow = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)]
    return nn.Sequential(*shallow, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(288, 4)).train()


def plain_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).train()


def blocked(model, **kwargs):
    return halfway.ForwardBlocker(model, "2", 0.5, selector=density(), **kwargs)


def check_recomputed(model, blocker, x, found, reason):
    assert blocker.stats.steps_replayed == 0
    assert reason in " ".join(blocker.stats.recompute_reasons), blocker.stats.recompute_reasons
    blocker.remove()
    assert relative_difference(found, gradients(model, x)) < 1e-6


@pytest.fixture
def x():
    return torch.randn(8, 5)


# --- nothing stale is ever replayed ---------------------------------------------------------------------------------


def test_inputs_changed_in_place_after_the_selection_are_computed(x):
    model = plain_net()
    blocker = blocked(model)
    retained = blocker(x)
    retained.mul_(2)
    with pytest.warns(UserWarning, match="changed in place"):
        found = gradients(model, retained)
    check_recomputed(model, blocker, retained, found, "changed in place")


def test_new_tensors_made_from_the_retained_samples_are_computed(x):
    model = plain_net()
    blocker = blocked(model)
    retained = blocker(x)
    mixed = 0.3 * retained + 0.7 * retained.flip(0)
    with pytest.warns(UserWarning, match="before the blocker"):
        found = gradients(model, mixed)
    check_recomputed(model, blocker, mixed, found, "not called with the tensors")


def test_parameters_that_stepped_in_between_are_seen(x):
    model = plain_net()
    blocker = blocked(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    gradients(model, x)
    retained = blocker(x)
    with pytest.warns(UserWarning, match="optimizer stepped"):
        optimizer.step()
    found = gradients(model, retained)
    check_recomputed(model, blocker, retained, found, "optimizer stepped")


@pytest.mark.parametrize("fused", [False, True])
def test_fused_optimizers_that_do_not_move_the_version_are_seen(x, fused):
    model = plain_net()
    blocker = blocked(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=fused)
    gradients(model, x)
    retained = blocker(x)
    with pytest.warns(UserWarning, match="optimizer stepped"):
        optimizer.step()
    check_recomputed(model, blocker, retained, gradients(model, retained), "optimizer stepped")


def test_parameters_written_in_between_are_seen(x):
    model = plain_net()
    blocker = blocked(model)
    retained = blocker(x)
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    with pytest.warns(UserWarning, match="parameters or buffers changed"):
        found = gradients(model, retained)
    check_recomputed(model, blocker, retained, found, "parameters or buffers changed")


class Switched(nn.Module):
    """A shallow part that a switch turns into another program, of the same shapes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.cut, self.head = nn.Identity(), nn.Linear(5, 3)
        self.mode = "first"

    def forward(self, x):
        if self.mode in ("first", "both"):
            x = self.first(x)
        if self.mode in ("second", "both"):
            x = self.second(x)
        return self.head(self.cut(x))


@pytest.mark.parametrize(
    ("probed", "called", "reason"),
    [
        ("first", "second", "other parameters than in the probe"),
        ("both", "first", "fewer operations than in the probe"),
        ("first", "both", "other operations than in the probe"),
    ],
)
def test_a_model_that_is_switched_in_between_is_computed(x, probed, called, reason):
    model = Switched()
    blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=density())
    model.mode = probed
    gradients(model, blocker(x))
    retained = blocker(x)
    model.mode = called
    with pytest.warns(UserWarning, match=reason):
        found = gradients(model, retained)
    blocker.remove()
    assert relative_difference(found, gradients(model, retained)) == 0


def test_a_second_call_in_the_same_step_computes(x):
    model = plain_net()
    blocker = blocked(model)
    retained = blocker(x)
    first = gradients(model, retained)
    second = gradients(model, retained)
    assert blocker.stats.steps_replayed == 1
    assert relative_difference(first, second) < 1e-6


def test_a_call_that_never_comes_does_not_disturb_the_next_step(x):
    model = plain_net()
    blocker = blocked(model)
    blocker(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        retained = blocker(x + 1)
    found = gradients(model, retained)
    assert blocker.stats.steps_replayed == 1
    blocker.remove()
    assert relative_difference(found, gradients(model, retained)) < 1e-6


def test_an_evaluation_in_between_neither_replays_nor_ends_the_waiting(x):
    model = plain_net()
    blocker = blocked(model, reuse="replay")
    retained = blocker(x)
    model.eval()
    with torch.no_grad():
        evaluated = model(x)
        assert torch.equal(evaluated, model(x))
    model.train()
    found = gradients(model, retained)
    assert blocker.stats.steps_replayed == 1
    blocker.remove()
    assert relative_difference(found, gradients(model, retained)) < 1e-6
    torch.testing.assert_close(evaluated, model(x))


def test_data_writes_that_nothing_shows_are_found_by_the_spot_check(x):
    model = plain_net()
    blocker = blocked(model)
    for _ in range(40):
        retained = blocker(x)
        model[0].weight.data.mul_(1.01)
        gradients(model, retained)
    with pytest.warns(UserWarning, match=r"differ.*in '0'.*between steps 0 and 40"):
        blocker.set_epoch(1)
    # From then on it is computed.
    replayed = blocker.stats.steps_replayed
    for _ in range(3):
        retained = blocker(x)
        found = gradients(model, retained)
    assert blocker.stats.steps_replayed == replayed
    assert blocker.stats.recompute_reasons == {"a spot check found that replayed and computed values differ": 3}
    blocker.remove()
    assert relative_difference(found, gradients(model, retained)) < 1e-6


def test_a_failed_spot_check_is_an_error_where_replays_are_demanded(x):
    model = plain_net()
    blocker = blocked(model, reuse="replay")
    for _ in range(40):
        retained = blocker(x)
        model[0].weight.data.mul_(1.01)
        gradients(model, retained)
    with pytest.raises(halfway.ReplayError, match=r"differ.*in '0'"):
        blocker.set_epoch(1)


class GatedMixing(nn.Module):
    """Mixes samples through a gate that is closed at first, so that no value shows it."""

    def __init__(self):
        super().__init__()
        self.first, self.gate, self.second = nn.Linear(5, 6), nn.Parameter(torch.zeros(1)), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        h = self.first(x)
        return self.head(self.second(h + self.gate * h.roll(1, 0)).tanh())


def test_what_is_behind_a_gate_that_may_open_is_computed(x):
    model = GatedMixing().train()
    blocker = halfway.ForwardBlocker(model, "second", 0.5, selector=density())
    for gate in (0.0, 0.5):
        with torch.no_grad():
            model.gate.fill_(gate)
        with pytest.warns(UserWarning, match=r"computes 55% .* aten.roll") if not gate else contextlib.nullcontext():
            retained = blocker(x)
        found = gradients(model, retained)
        assert relative_difference(found, gradients(model, retained)) < 1e-6
    assert (blocker.stats.operations_replayed, blocker.stats.operations_computed) == (2, 2)
    assert "computed: aten.roll.default, which works along the batch" in blocker.explain()


class ZeroBranch(nn.Module):
    """A zero-initialised layer on (time, batch) rows: at first all its rows are equal, whoever they belong to."""

    def __init__(self):
        super().__init__()
        self.zero = nn.Linear(5, 6)
        nn.init.zeros_(self.zero.weight)
        self.cut, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        time_major = x.transpose(0, 1).reshape(-1, 5)
        h = self.zero(time_major).view(x.shape[1], len(x), 6).transpose(0, 1)
        return self.head(self.cut(h.tanh()).sum(1))


def test_an_operation_is_not_trusted_before_its_rows_differ():
    model, x = ZeroBranch().train(), torch.randn(4, 4, 5)
    blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=density())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(20):
        reference = copy.deepcopy(model)
        retained = blocker(x)
        found = gradients(model, retained)
        assert relative_difference(found, gradients(reference, retained)) < 1e-5
        optimizer.step()
    stats = blocker.stats
    assert stats.operations_computed >= 1
    assert stats.operations_replayed >= 10


class LayerDrop(nn.Module):
    """Skips a layer by a draw of Python's generator."""

    def __init__(self):
        super().__init__()
        self.first, self.maybe, self.cut, self.head = (nn.Linear(5, 5) for _ in range(4))

    def forward(self, x):
        h = self.first(x).tanh()
        if random.random() < 0.5:
            h = self.maybe(h)
        return self.head(self.cut(h))


class RolledAndDropped(nn.Module):
    """Mixes samples, then hides most of it: rows that drop path sets to zero agree whatever went before."""

    def __init__(self):
        super().__init__()
        self.stem, self.cut, self.head = nn.Linear(5, 5), nn.Identity(), nn.Linear(5, 2)

    def forward(self, x):
        kept = torch.empty(len(x), 1).bernoulli_(0.3)
        return self.head(self.cut(self.stem(x.roll(1, 0) * kept)))


@pytest.mark.filterwarnings("ignore:halfway computes")
def test_mixing_that_drop_path_hides_at_first_is_never_replayed():
    for seed in range(40):
        torch.manual_seed(seed)
        model = RolledAndDropped()
        blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=density())
        for _ in range(6):
            model(blocker(torch.randn(5, 5)))
        assert blocker.stats.operations_replayed == 0


class Flipped(nn.Module):
    """Where the retained rows lie symmetrically, flipping them is the same as flipping the batch."""

    def __init__(self):
        super().__init__()
        self.stem, self.cut, self.head = nn.Linear(5, 5), nn.Identity(), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.cut(self.stem(x.flip(0))))


@pytest.mark.filterwarnings("ignore:halfway computes")
def test_a_flipped_batch_is_never_replayed_also_if_the_rows_lie_symmetrically():
    for seed in range(40):
        torch.manual_seed(seed)
        model = Flipped()
        # The first call shows autocast, so that the second step is rehearsed anew, in the middle of training.
        blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=density(), seed=seed)
        for _ in range(6):
            retained = blocker(torch.randn(4, 5))
            with torch.autocast("cpu", torch.bfloat16):
                model(retained)
        assert blocker.stats.operations_replayed == 0


def test_layers_dropped_by_pythons_generator_are_dropped_alike_and_drawn_once(x):
    model = LayerDrop().train()
    blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=density(), reuse="replay")
    random.seed(0)
    for _ in range(8):
        gradients(model, blocker(x))
    drawn = random.getstate()
    assert blocker.stats.steps_replayed == 8
    random.seed(0)
    for _ in range(8):
        random.random()
    assert random.getstate() == drawn


def test_python_draws_between_the_blocker_and_the_model_are_not_lost(x):
    model = LayerDrop().train()
    blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=density(), reuse="replay")
    random.seed(0)
    retained = blocker(x)
    between = random.random()
    gradients(model, retained)
    after = random.random()
    random.seed(0)
    assert [random.random() for _ in range(3)][1:] == [between, after]


# --- what cannot be replayed is said --------------------------------------------------------------------------------


def test_demanding_a_replay_raises_instead_of_falling_back(x):
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.b(self.a(x.roll(1, 0)))

    model = Mixing().train()
    before = copy.deepcopy(model.state_dict())
    blocker = halfway.ForwardBlocker(model, "a", 0.5, reuse="replay")
    with pytest.raises(halfway.ReplayError, match=r"depends on other samples .* aten.roll"):
        blocker(x)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_under_activation_checkpointing_is_recomputed(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            x = x.clone().requires_grad_()
            inner = lambda x: F.dropout(self.a(x), 0.5)  # noqa: E731
            return self.c(self.b(checkpoint(inner, x, use_reentrant=use_reentrant)))

    model = Checkpointed().train()
    blocker = halfway.ForwardBlocker(model, "b", 0.5, selector=density())
    with pytest.warns(UserWarning, match="checkpoint"):
        retained = blocker(torch.randn(8, 5))
    state = torch.get_rng_state()
    found = gradients(model, retained)
    assert blocker.stats.steps_recomputed == 1
    torch.set_rng_state(state)
    assert relative_difference(found, gradients(model, retained)) < 1e-6


def test_checkpointed_convolutions_without_randomness_replay():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.c(self.b(checkpoint(lambda x: self.a(x).tanh(), x, use_reentrant=False)))

    model = Checkpointed().train()
    blocker = halfway.ForwardBlocker(model, "b", 0.5, selector=density(), reuse="replay")
    retained = blocker(torch.randn(8, 5))
    found = gradients(model, retained)
    blocker.remove()
    assert relative_difference(found, gradients(model, retained)) < 1e-6


# --- cost and memory ------------------------------------------------------------------------------------------------


def test_a_replayed_step_costs_what_was_predicted():
    model = freeze_batch_norm(vision().resnet18().train())
    x = torch.randn(10, 3, 32, 32)
    with FlopCounterMode(display=False) as full:
        gradients(model, x)
    blocker = halfway.ForwardBlocker(model, "layer1", 0.4, selector=density(), reuse="replay")
    gradients(model, blocker(x))
    with FlopCounterMode(display=False) as counter:
        gradients(model, blocker(x))
    relative = counter.get_total_flops() / full.get_total_flops()
    assert relative == pytest.approx(blocker.stats.relative_flops, abs=0.005)
    assert relative < 0.66


def recorded_tensors(blocker):
    tape = blocker._engine._pending.probe.tape
    return [weakref.ref(o) for e in tape.entries for o in e.outputs if isinstance(o, torch.Tensor)]


def alive(references):
    gc.collect()
    return sum(r() is not None for r in references)


def test_recordings_are_freed_when_they_have_been_replayed(x):
    model = plain_net()
    blocker = blocked(model)
    retained = blocker(x)
    recorded = recorded_tensors(blocker)
    assert alive(recorded) == 2
    seen = []
    model[2].register_forward_hook(lambda *_: seen.append(alive(recorded)))
    output = model(retained)
    assert seen == [0]
    assert output.requires_grad


def test_recordings_are_freed_when_the_forward_raises(x):
    model = plain_net()
    blocker = blocked(model)
    retained = blocker(x)
    recorded = recorded_tensors(blocker)

    def fail(*_):
        raise RuntimeError("from the user's forward")

    handle = model[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="from the user's forward"):
        model(retained)
    handle.remove()
    assert alive(recorded) == 0
    assert "forward" not in vars(model)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    found = gradients(model, blocker(x))
    assert blocker.stats.steps_replayed == 1
    assert found


def test_recordings_are_freed_when_the_retained_samples_are_dropped(x):
    model = plain_net()
    blocker = blocked(model)
    retained = blocker(x)
    recorded = recorded_tensors(blocker)
    assert alive(recorded) == 2
    del retained
    assert alive(recorded) == 0
    with pytest.warns(UserWarning, match="before the blocker"):
        assert blocker.stats.steps_recomputed == 1


def test_an_interrupt_in_the_shallow_part_leaves_nothing_behind(x):
    model = plain_net()
    blocker = blocked(model)
    retained = blocker(x)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(retained)
    handle.remove()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert "forward" not in vars(model)
    assert not model._forward_pre_hooks
    assert not model[2]._forward_hooks


# --- the usual circumstances ----------------------------------------------------------------------------------------


def test_autocast_around_the_model_only_replays_from_the_second_step_on():
    model = vision().resnet18().train()
    x = torch.randn(8, 3, 32, 32)
    blocker = halfway.ForwardBlocker(model, "layer1", 0.5, selector=density())
    for _ in range(3):
        retained = blocker(x)
        with torch.autocast("cpu", torch.bfloat16):
            loss = scalar(model(retained))
        loss.backward()
    assert blocker.stats.steps_replayed == 2


def test_channels_last_is_kept():
    model = vision().resnet18().train().to(memory_format=torch.channels_last)
    x = torch.randn(8, 3, 32, 32).to(memory_format=torch.channels_last)
    blocker = halfway.ForwardBlocker(model, "layer1", 0.5, selector=density(), reuse="replay")
    seen = []
    model.layer1.register_forward_hook(lambda m, a, o: seen.append(o.is_contiguous(memory_format=torch.channels_last)))
    retained = blocker(x)
    assert retained.is_contiguous(memory_format=torch.channels_last)
    gradients(model, retained)
    assert all(seen)
    assert blocker.stats.steps_replayed == 1


def test_gradients_accumulate_over_several_blocked_batches(x):
    model = plain_net()
    blocker = blocked(model, reuse="replay")
    model.zero_grad()
    parts = []
    for shift in (0.0, 1.0):
        parts.append(blocker(x + shift))
        model(parts[-1]).square().sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    blocker.remove()
    model.zero_grad()
    model(torch.cat(parts)).square().sum().backward()
    assert relative_difference(found, {n: p.grad for n, p in model.named_parameters()}) < 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_steady_step_never_waits_for_the_device():
    model = vision().resnet18().train().cuda()
    x = torch.randn(16, 3, 64, 64, device="cuda")
    blocker = halfway.ForwardBlocker(model, "layer1", 0.5, selector=density())
    for _ in range(4):
        scalar(model(blocker(x))).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            scalar(model(blocker(x))).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert blocker.stats.steps_replayed >= 6
