"""Selectors: which samples stay, and what they look at."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from halfway import Density, ForwardBlocker, Random, Schedule, Selection, Selector
from halfway.selectors import SELECTORS, Candidates, Ranking, make
from halfway.selectors.base import retained_rows
from halfway.selectors.tools.channels import find_channel_dim
from halfway.state.sample_memory import SampleMemory

from ..helpers import processes


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.cut = nn.Identity()
        self.head = nn.Linear(width, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.head(self.cut(x))


def candidates(features=None, size=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Candidates(len(features) if size is None else size, generator, features)


# -------------------------------------------------------------------------------------------------- by name


def test_selectors_are_known_by_name():
    assert isinstance(make("density"), Density)
    assert isinstance(make("random"), Random)
    assert {"density", "random"} <= set(SELECTORS)
    mine = Random()
    assert make(mine) is mine


def test_a_selector_of_ones_own_decides_and_is_told():
    class Last(Selector):
        name = "last"
        needs = "features"
        seen = None

        def select(self, candidates, count):
            assert candidates.features.shape == (candidates.size, 4)
            assert not candidates.features.requires_grad
            assert not torch.is_grad_enabled()
            return Selection(torch.arange(candidates.size - count, candidates.size))

        def learn(self, candidates, retained):
            self.seen = (candidates.ids, retained)

    model, selector, ids = Net(), Last(), torch.arange(8) + 100
    blocker = ForwardBlocker(model, "cut", 0.5, selector=selector)
    x = torch.randn(8, 4)
    kept = blocker(x, ids=ids)
    assert torch.equal(kept, x[4:])
    assert selector.seen[0] is ids
    assert selector.seen[1].tolist() == [4, 5, 6, 7]
    assert blocker.last.importance is None
    model(kept)
    assert blocker.stats.steps_replayed == 1


class Seen(Ranking):
    """As an author writes one: settings, a choice, and what is learned from it."""

    name = "seen"
    wants_ids = "required"

    def __init__(self, step: float = 1.0, num_samples: int | None = None, key=abs) -> None:
        self.step = step
        self._times = self.remember("times", SampleMemory(1, num_samples, unknown=0.0))

    def importance(self, candidates):
        return -self._times.read(candidates.required_ids).squeeze(1)

    def learn(self, candidates, retained):
        ids = retained_rows(candidates.required_ids, retained)
        self._times.write(ids, self._times.read(ids) + self.step, candidates.ranks, candidates.size)


class Counted(Seen):
    name = "counted"

    def __init__(self, more: int = 2) -> None:
        super().__init__(step=more, num_samples=8)


def test_settings_state_and_checks_come_with_the_base_class():
    assert Seen(2).config() == {"step": 2.0, "num_samples": None, "key": "abs"}
    assert Counted(3).config() == {"more": 3}  # what this class was made with, not its base
    first, second = Counted(), Counted()
    first.learn(Candidates(3, torch.Generator(), ids=torch.tensor([1, 4, 6])), torch.tensor([0, 2]))
    assert first.state_dict()["times"].squeeze(1).tolist() == [0, 2, 0, 0, 0, 0, 2, 0]
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.state_dict()["times"], first.state_dict()["times"])
    with pytest.raises(ValueError, match=r"the selector 'counted' has \['times'\], this one has \[\]"):
        second.load_state_dict({})
    with pytest.raises(ValueError, match="the id 8"):
        second.importance(Candidates(1, torch.Generator(), ids=torch.tensor([8])))
    assert (first.diagnostics(), Random().config(), Random().state_dict()) == ({}, {}, {})


def join(rank):
    """Rank 1 has one batch less. Neither the class above nor its user has said anything about that."""
    model = DistributedDataParallel(Net())
    blocker = ForwardBlocker(model, None, 0.5, selector=Seen(), timeout=20)
    with Join([model, blocker]):
        for step in range(3 - rank):
            ids = torch.arange(4) + 4 * rank + 8 * step
            model(blocker(torch.randn(4, 4), ids=ids)).sum().backward()
    return blocker.selector.state_dict()["times"].squeeze(1)[:24]


def test_a_rank_without_batches_takes_part_in_what_any_selector_learns():
    first, second = processes.run(2, join)
    assert torch.equal(first, second)
    assert [int(first[i : i + 4].sum()) for i in range(0, 24, 4)] == [2, 2, 2, 2, 2, 0]


def test_what_a_selector_needs_is_known_without_making_one():
    assert {name: kind.needs for name, kind in SELECTORS.items() if kind.needs != "outputs"} == {
        **dict.fromkeys(["density", "density_public", "balanced"], "features"),
        **dict.fromkeys(["random", "rotate", "last_loss", "last_loss_hard", "balanced_remembered"], "nothing"),
    }


# --------------------------------------------------------------------------------------------------- random


def test_random_never_runs_the_model():
    model = Net()
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    blocker = ForwardBlocker(model, None, 0.5, selector="random", schedule=Schedule(1, 4, unit="step"))
    for i in range(6):
        assert len(blocker(torch.randn(8, 4))) == (4 if 1 <= i < 4 else 8)
    assert calls == []
    assert model.calls == 0
    assert "forward" not in vars(model)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_random_draws_every_sample_equally_often(ratio):
    size, steps = 16, 1500
    blocker = ForwardBlocker(Net(), None, ratio, selector=Random(), seed=3)
    x = torch.randn(size, 4)
    drawn = torch.zeros(size)
    together = 0
    for _ in range(steps):
        blocker(x)
        indices = blocker.last.indices
        assert len(indices.unique()) == size - round(ratio * size)
        drawn[indices] += 1
        together += bool((indices == 0).any() and (indices == 1).any())
    p = 1 - ratio
    sd = (steps * p * (1 - p)) ** 0.5
    assert (drawn - steps * p).abs().max() < 4.5 * sd
    pair = p * (size * p - 1) / (size - 1)
    assert abs(together - steps * pair) < 4.5 * (steps * pair * (1 - pair)) ** 0.5


def test_neighbouring_seeds_draw_independently():
    size = 64
    x = torch.randn(size, 4)
    agreement = []
    for seed in range(20):
        chosen = []
        for s in (seed, seed + 1):
            with ForwardBlocker(Net(), None, 0.5, selector="random", seed=s) as blocker:
                for _ in range(2):
                    blocker(x)
                    chosen.append(set(blocker.last.indices.tolist()))
        agreement += [len(a & b) for i, a in enumerate(chosen) for b in chosen[:i]]
    assert abs(sum(agreement) / len(agreement) - size / 4) < 1


def test_random_has_no_importance_and_a_sorted_choice():
    selection = Random().select(candidates(size=20), 7)
    assert selection.importance is None
    assert selection.weights is None
    assert selection.indices.tolist() == sorted(set(selection.indices.tolist()))
    assert len(selection.indices) == 7


# ----------------------------------------------------------------------------------------- where the channels are


class NoWidth(nn.Module):
    pass


@pytest.mark.parametrize(
    ("layer", "shape", "axis"),
    [
        (nn.Conv2d(3, 16, 3), (8, 16, 7, 7), 1),
        (nn.Conv2d(3, 16, 3), (8, 16, 16, 16), 1),
        (nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()), (8, 16, 7, 5), 1),
        (nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU()), (8, 16, 7, 5), 1),
        (nn.Conv1d(3, 16, 3), (8, 16, 7), 1),
        (nn.Conv3d(3, 16, 3), (8, 16, 4, 7, 7), 1),
        (nn.LayerNorm(12), (8, 7, 7, 12), -1),
        (nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)), (8, 7, 7, 12), -1),
        (nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.Dropout(0.1)), (8, 5, 24), -1),
        (nn.Embedding(30, 12), (8, 5, 12), -1),
        (nn.TransformerEncoderLayer(12, 2, 24), (8, 5, 12), -1),
        (nn.Linear(4, 12), (8, 12), 1),
        (nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten()), (8, 400), 1),
        (nn.Sequential(nn.Linear(3, 16), NoWidth()), (8, 16, 7, 7), 1),
        (NoWidth(), (8, 16, 7, 7), 1),
        (NoWidth(), (8, 7, 7, 16), -1),
        (NoWidth(), (8, 49, 16), -1),
        (None, (8, 16, 7, 5), 1),
    ],
)
def test_the_channel_axis_is_found(layer, shape, axis):
    found = find_channel_dim(layer, torch.Size(shape))
    assert found % len(shape) == axis % len(shape)


def in_model(model, layer_name, x):
    """The number of dimensions of the estimator after one step through the whole blocker."""
    selector = Density(num_centroids=2)
    blocker = ForwardBlocker(model, layer_name, 0.5, selector=selector, reuse="recompute")
    blocker(x)
    blocker.remove()
    return selector.estimator.dim


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_memory_format_does_not_move_the_channels(memory_format):
    model = nn.Sequential(nn.Conv2d(3, 10, 3), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(6, 3, 8, 8)
    model(x)
    model = model.to(memory_format=memory_format)
    assert in_model(model, "0", x.to(memory_format=memory_format)) == 10


@pytest.mark.parametrize(
    ("name", "layer_name", "channels"),
    [
        ("resnet18", "layer1", 64),
        ("swin_t", "features.1", 96),
        ("swin_t", "features.2", 128),
        ("convnext_tiny", "features.1", 96),
        ("vit_b_16", "encoder.layers.encoder_layer_0", 128),
        ("mobilenet_v3_small", "features.3", 24),
    ],
)
def test_the_channels_of_torchvision_models_are_found(name, layer_name, channels):
    models = pytest.importorskip("torchvision").models
    settings = {"image_size": 32} if name.startswith("vit") else {}
    with torch.device("meta"):
        model = models.get_model(name, weights=None, **settings)
    layer = model.get_submodule(layer_name)
    shapes = []
    layer.register_forward_hook(lambda module, args, out: shapes.append(out.shape))
    model(torch.empty(3, 3, 64 if not settings else 32, 64 if not settings else 32, device="meta"))
    axis = find_channel_dim(layer, shapes[0])
    assert min(128, shapes[0][axis]) == channels


def test_the_representation_is_pooled_over_space_and_never_wider_than_asked():
    features = torch.randn(6, 10, 4, 4)
    for dim, expected in ((128, features.mean((2, 3))), (5, features.mean((2, 3)).unflatten(1, (5, 2)).mean(2))):
        selector = Density(num_centroids=6, dim=dim)
        selector.bind("conv", nn.Conv2d(3, 10, 3))
        selector.learn(candidates(features), None)
        torch.testing.assert_close(selector.estimator.centroids, expected)


def test_an_explicit_channel_axis_wins():
    features = torch.randn(4, 10, 3, 7)
    selector = Density(num_centroids=4, channel_dim=3)
    selector.bind("conv", nn.Conv2d(3, 10, 3))
    selector.learn(candidates(features), None)
    torch.testing.assert_close(selector.estimator.centroids, features.mean((1, 2)))


def test_features_of_another_width_name_the_layer_and_the_fix():
    selector = Density(num_centroids=4)
    selector.bind("blocks.3", nn.Identity())
    selector.learn(candidates(torch.randn(6, 10)), None)
    for use in (
        lambda c: selector.select(c, 3),
        lambda c: selector.learn(c, None),
    ):
        with pytest.raises(ValueError, match=r"'blocks.3' now have 9 channels.*made for 10.*channel_dim"):
            use(candidates(torch.randn(6, 9)))


# -------------------------------------------------------------------------------------------------------- density


def test_until_the_centroids_are_complete_the_choice_is_random_and_exact():
    model = Net()
    selector = Density(num_centroids=40)
    blocker = ForwardBlocker(model, "cut", 0.5, selector=selector)
    x = torch.randn(8, 4)
    chosen = set()
    for i in range(9):
        model(blocker(x))
        assert len(blocker.last.indices) == 4
        assert blocker.last.importance.shape == (8,)
        assert selector.estimator.ready == (4 * (i + 1) >= 40)
        chosen.add(tuple(blocker.last.indices.tolist()))
    assert len(chosen) > 5


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("noise", [0, 0.01])
def test_duplicates_are_pruned_before_isolated_samples(noise, seed):
    """Half of each batch are near-copies of one sample, the others lie far out: the copies go. (In the first pruned
    step: from then on the estimator learns from what is retained, and forgets the copies.)"""
    torch.manual_seed(seed)
    model = Net(width=8)
    blocker = ForwardBlocker(
        model, "cut", 0.5, selector=Density(num_centroids=16, noise=noise), schedule=Schedule(4, unit="step")
    )
    common = torch.randn(8)
    for _ in range(5):
        x = common + 10 * nn.functional.normalize(torch.randn(32, 8))
        copies, isolated = torch.randperm(32).chunk(2)
        x[copies] = common + 0.05 * torch.randn(16, 8)
        model(blocker(x))
    assert torch.equal(blocker.last.indices, isolated.sort().values)
    assert blocker.last.importance[copies].max() < blocker.last.importance[isolated].min()


def test_only_the_retained_samples_are_learned():
    selector = Density(num_centroids=2)
    features = torch.arange(12.0).reshape(6, 2)
    selector.learn(candidates(features), torch.tensor([1, 4]))
    torch.testing.assert_close(selector.estimator.centroids, features[[1, 4]])
    assert selector.estimator.counts.tolist() == [1, 1]


def test_noise_zero_is_deterministic_and_large_noise_reorders():
    torch.manual_seed(0)
    features = torch.randn(64, 4)

    def choose(noise, seed):
        selector = Density(num_centroids=8, noise=noise)
        selector.learn(candidates(features), None)
        return selector.select(candidates(features, seed=seed), 32)

    assert torch.equal(choose(0, 1).indices, choose(0, 2).indices)
    assert not torch.equal(choose(1e6, 1).indices, choose(1e6, 2).indices)
    for selection in (choose(0, 1), choose(0.5, 1)):
        lowest_retained = selection.importance[selection.indices].min()
        assert (selection.importance > lowest_retained).sum() == 31
        assert selection.importance.shape == (64,)


def test_half_precision_features_are_scored_in_full_precision():
    torch.manual_seed(0)
    features = torch.randn(32, 4)
    choices = []
    for dtype in (torch.float32, torch.bfloat16):
        selector = Density(num_centroids=8, noise=0)
        f = features.bfloat16().to(dtype)
        selector.learn(candidates(f), None)
        assert selector.estimator.centroids.dtype == torch.float32
        choices.append(selector.select(candidates(f), 16).indices)
    assert torch.equal(*choices)


def test_the_state_of_the_selector_travels():
    first, second = Density(num_centroids=4), Density(num_centroids=4)
    features = torch.randn(10, 6)
    first.learn(candidates(features), None)
    second.load_state_dict(first.state_dict())
    a, b = (s.select(candidates(features), 5) for s in (first, second))
    assert torch.equal(a.indices, b.indices)
    assert torch.equal(a.importance, b.importance)
    second.load_state_dict(Density(num_centroids=4).state_dict())
    assert second.estimator is None
