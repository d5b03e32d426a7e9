"""Centroids and the samples nearest to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pytest.importorskip("torchmetrics")
pytest.importorskip("torchvision")
pytest.importorskip("yaml")

from halfway.lab import data
from halfway.lab.recipes import reading
from halfway.lab.report import centroids as report_centroids
from halfway.lab.training.run_folder import RunFolder


def test_nearest_samples_are_those_of_a_brute_force_search(compared: Path) -> None:
    folder = RunFolder(compared / "pfb-0.5-s0")
    recipe, state = reading.load(str(folder.config)), folder.load()
    assert state is not None
    loaded = data.load(recipe.data, recipe.root)
    before = torch.random.get_rng_state()
    centroids, counts, x, ids = report_centroids.represent(recipe, state, loaded)
    found = report_centroids.heaviest(recipe, state, loaded, 16, 4)
    assert torch.equal(torch.random.get_rng_state(), before)
    stored = state["blocker"]["selector"]
    assert torch.equal(counts, stored["counts"])
    assert torch.equal(centroids, stored["centroids"][:, : stored["width"]])
    assert x.shape == (256, 8)
    assert ids.tolist() == list(range(256))
    assert [c.share for c in found] == sorted((c.share for c in found), reverse=True)
    heaviest = sorted(range(64), key=lambda c: -int(counts[c]))[:16]
    for c, centroid in zip(heaviest, found, strict=True):
        distances = [sum((float(a) - float(b)) ** 2 for a, b in zip(row, centroids[c], strict=True)) for row in x]
        assert centroid.nearest == sorted(range(256), key=lambda i: distances[i])[:4]
        assert centroid.share == pytest.approx(int(counts[c]) / int(counts.sum()))


def test_representations_are_the_models_features_at_the_cut(compared: Path) -> None:
    from halfway.lab.models import small as nets

    folder = RunFolder(compared / "pfb-0.5-s0")
    recipe, state = reading.load(str(folder.config)), folder.load()
    assert state is not None
    loaded = data.load(recipe.data, recipe.root)
    _, _, x, ids = report_centroids.represent(recipe, state, loaded)
    model = nets.build(recipe.model.name, 10, recipe.model.options, None, 0, 16).eval()
    model.load_state_dict(state["model"])
    features: list[torch.Tensor] = []
    model.get_submodule(recipe.cut).register_forward_hook(lambda *parts: features.append(parts[2]))
    plan = [(ids[:100], report_centroids.seed_of(0, 0))]
    model(next(iter(loaded.train.batches(plan)))[0])
    torch.testing.assert_close(x[:100], features[0].mean((2, 3)))


def test_weights_and_centroids_are_all_that_is_read_of_a_checkpoint(compared: Path) -> None:
    folder = RunFolder(compared / "pfb-0.5-s0")
    recipe, state = reading.load(str(folder.config)), folder.load()
    assert state is not None
    loaded = data.load(recipe.data, recipe.root)
    needed = {"model": state["model"], "blocker": {"selector": state["blocker"]["selector"]}}
    for part, whole in zip(
        report_centroids.represent(recipe, needed, loaded),
        report_centroids.represent(recipe, state, loaded),
        strict=True,
    ):
        assert torch.equal(part, whole)
    untrained = {**needed, "blocker": {"selector": {**needed["blocker"]["selector"], "width": 0}}}
    with pytest.raises(ValueError, match="ended before the density had seen a sample"):
        report_centroids.represent(recipe, untrained, loaded)
