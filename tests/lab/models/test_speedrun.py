"""The network of few passes: what its first layer computes from images, how it begins, and that it is replayed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("torchvision")
pytest.importorskip("torchmetrics")
pytest.importorskip("tensorboard")

import halfway
from halfway.lab.models import small as nets
from halfway.lab.models.speedrun import Whitening, prepare
from halfway.lab.recipes.predicted_cost import probe_share, sample_flops
from halfway.lab.recipes.reading import load as load_recipe
from halfway.lab.recipes.schema import Recipe
from halfway.lab.training.building import PREPARED_ON
from halfway.lab.training.loop import Training
from halfway.lab.training.run_folder import RunFolder
from tests.helpers.replays import freeze_batch_norm, gradients, relative_difference
from tests.helpers.small_training import CPU, assert_same_run, load, trained

WIDTHS = [6, 8, 8]


def net(**options: Any) -> nn.Module:
    return nets.build("speedrun", 10, {"widths": WIDTHS, **options}, None, 0)


def images(seed: int = 0) -> Tensor:
    """(300, 3, 5, 5) with neighbours and colours that resemble each other."""
    noise = torch.randn(300, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    return F.avg_pool2d(noise, 2, 1) + 0.5 * noise.mean(1, keepdim=True)[..., 1:, 1:] + 0.2


def prepared(x: Tensor, **settings: Any) -> Whitening:
    layer = Whitening(**settings)
    layer.prepare(x)
    return layer


def moments(layer: Whitening, x: Tensor) -> Tensor:
    """The mean products of every two outputs, by a loop over patches."""
    weights = layer.filters.double().flatten(1)
    patches = [image[:, i : i + 2, j : j + 2].double().flatten() for image in x for i in range(4) for j in range(4)]
    outputs = [weights @ patch for patch in patches]
    return sum(torch.outer(o, o) for o in outputs) / len(outputs)  # type: ignore[return-value]


# ------------------------------------------------------------------ whitening


def test_prepared_outputs_do_not_correlate_and_have_a_mean_square_of_one() -> None:
    x = images()
    found = moments(prepared(x, floor=0.0), x)[:12, :12]
    torch.testing.assert_close(found, torch.eye(12, dtype=torch.float64), atol=1e-4, rtol=0)
    plain = moments(Whitening(), x)[:12, :12]
    assert float((plain - plain.diag().diag()).abs().max()) > 0.05, "they do before"


def test_the_faintest_directions_stay_faint() -> None:
    x = images()
    squares = 1 / prepared(x, floor=0.0).filters[:12].flatten(1).double().norm(dim=1) ** 2
    assert torch.equal(squares, squares.sort(descending=True).values), "the strongest comes first"
    floor = 0.05
    found = moments(prepared(x, floor=floor), x)[:12, :12]
    torch.testing.assert_close(found.diag(), squares / (squares + floor * squares[0]), atol=1e-4, rtol=1e-4)
    assert float(found[11, 11]) < 0.5


def test_every_output_comes_with_both_signs() -> None:
    x = images()
    for layer in (Whitening(), prepared(x)):
        out = layer(x)
        assert out.shape == (300, 24, 4, 4)
        assert torch.equal(out[:, :12], -out[:, 12:])


def test_without_images_the_filters_are_orthonormal() -> None:
    rows = Whitening().filters[:12].flatten(1)
    torch.testing.assert_close(rows @ rows.T, torch.eye(12))


def test_the_filters_do_not_depend_on_the_signs_a_solver_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    want, solve = prepared(images()).filters, torch.linalg.eigh

    def other_signs(a: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = solve(a)
        return values, vectors * torch.tensor([1.0, -1.0] * 6, dtype=vectors.dtype)

    monkeypatch.setattr(torch.linalg, "eigh", other_signs)
    assert torch.equal(prepared(images()).filters, want)


def test_models_without_such_a_layer_ask_for_no_images() -> None:
    prepare(nn.Linear(3, 3), lambda: pytest.fail("asked"))


# -------------------------------------------------------------------- network


def test_convolutions_begin_as_identities() -> None:
    model = net()
    for stage, (inputs, width) in zip(
        (model.layer1, model.layer2, model.layer3), ((24, 6), (6, 8), (8, 8)), strict=True
    ):
        for conv, channels in ((stage[0], inputs), (stage[4], width)):
            x = torch.randn(2, channels, 5, 5)
            same = min(channels, width)
            torch.testing.assert_close(conv(x)[:, :same], x[:, :same])
            assert channels >= width or float(conv(x)[:, channels:].detach().std()) > 0.1


def test_logits_are_scaled() -> None:
    x = torch.randn(4, 3, 16, 16)
    torch.testing.assert_close(net(scale=0.25).eval()(x), 0.25 * net(scale=1.0).eval()(x))


def test_most_of_the_work_lies_behind_the_first_stage() -> None:
    recipe = load_recipe("speedrun-cifar10")
    shallow = 12 * 24 * 31**2 + 9 * (24 * 32 * 31**2 + 32 * 32 * 15**2)
    deep = 9 * (32 * 128 * 15**2 + 128 * 128 * 7**2) + 9 * (128 * 128 * 7**2 + 128 * 128 * 3**2) + 128 * 10
    flops = sample_flops(recipe)
    assert flops.forward == 2 * (shallow + deep)
    assert probe_share(recipe) == pytest.approx(2 * shallow / flops.step)
    assert probe_share(recipe) < 0.1


# ------------------------------------------------------------------ replaying


@pytest.mark.parametrize("cut", ["layer1", "layer2"])
def test_a_blocked_step_is_a_plain_step_on_the_retained_samples(cut: str) -> None:
    model = freeze_batch_norm(net().to(memory_format=torch.channels_last).train())
    x = torch.randn(16, 3, 32, 32).to(memory_format=torch.channels_last)
    blocker = halfway.ForwardBlocker(model, cut, 0.5, selector=halfway.Density(num_centroids=4), reuse="replay")
    retained = blocker(x)
    found = gradients(model, retained)
    stats = blocker.stats
    assert (len(retained), stats.steps_replayed, stats.steps_recomputed) == (8, 1, 0)
    blocker.remove()
    assert relative_difference(found, gradients(model, retained)) < 1e-5


# ------------------------------------------------------------------- training


def small(**changes: Any) -> Recipe:
    settings = {
        "root": "synthetic",
        "data.train_samples": 96,
        "data.test_samples": 32,
        "data.size": [16, 16],
        "model.options": {"widths": WIDTHS},
        "batch_size": 32,
        "length": 2,
        "learning_rate.warmup": 0.4,
        "batch_norm_samples": 32,
        "training_score": 32,
    }
    return load_recipe("speedrun-cifar10").with_settings({**settings, **changes})


def filters(model: Any) -> Tensor:
    return model.whitening.filters


@pytest.mark.parametrize("method", ["full", "pfb", "proxy"])
def test_the_first_layer_is_computed_from_training_images_and_stays(method: str) -> None:
    recipe = small(method=method, **{"proxy.model": {"widths": [2, 4, 4]}})
    loaded = load(recipe)
    x = next(iter(loaded.trained_on.batches(PREPARED_ON)))[0]
    want = prepared(x).filters
    training = Training(recipe, loaded, CPU, show=False)
    models = [training.model]
    if training.blocker is not None:
        models += [training.blocker.selector.model] if method == "proxy" else []
    for seed in (0, 1):
        models.append(Training(recipe.with_settings({"seed": seed}), loaded, CPU, show=False).model)
    before = copy.deepcopy(training.model.layer1.state_dict())
    assert training.run()
    for model in models:
        torch.testing.assert_close(filters(model), want, atol=0, rtol=0)
    assert not torch.equal(before["0.weight"], training.model.layer1[0].weight), "the others are trained"
    if method == "pfb":
        assert training.blocker is not None
        assert (training.blocker.stats.steps_replayed, training.blocker.stats.steps_recomputed) == (6, 0)


def test_given_weights_bring_their_own_first_layer(tmp_path: Path) -> None:
    model = net()
    filters(model).fill_(0.5)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    recipe = small(**{"model.weights": str(tmp_path / "weights.pt")})
    training = Training(recipe, load(recipe), CPU, show=False)
    assert torch.equal(filters(training.model), filters(model))


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    recipe = small()
    folders = [RunFolder(tmp_path / name) for name in ("whole", "stopped")]
    for folder in folders:
        folder.open(recipe, False)
    trained(recipe, folders[0])
    calls = iter([False, True])
    assert not Training(recipe, load(recipe), CPU, folders[1], show=False).run(lambda: next(calls))
    folders[1].open(recipe, True)
    trained(recipe, folders[1])
    assert_same_run(*folders)
