"""How much of PFB's choice is the density's, and how much the noise's, at any number of dimensions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfway import Density, ForwardBlocker
from halfway import functional as PF
from halfway.selectors import Candidates

from ..helpers.waiting import NoWaiting


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def share_of_density(log_f: Tensor, count: int, **noise: Any) -> float:
    """The same as the diagnostic, by sets of rows."""
    alone = set(PF.retain(-log_f, count).tolist())
    shares = []
    for seed in range(20):
        rows = set(PF.retain(PF.importance(log_f, generator=generator(seed), **noise), count).tolist())
        chance = count / len(log_f)
        shares.append((len(rows & alone) / count - chance) / (1 - chance))
    return sum(shares) / len(shares)


def log_densities(D: int, size: int = 400) -> Tensor:
    """Of Gaussian samples under 64 kernels on samples of the same kind."""
    x = torch.randn(64 + size, D, generator=generator(D))
    return PF.log_density(x[64:], x[:64])


def test_the_papers_noise_drowns_the_density_where_there_are_many_dimensions() -> None:
    found = {D: share_of_density(log_densities(D), 200, noise=0.01) for D in (2, 16, 64, 128)}
    assert found[2] > 0.95
    assert 0.4 < found[16] < 0.8
    assert max(found[64], found[128]) < 0.1


@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
def test_noise_relative_to_the_spread_has_the_same_effect_at_any_number_of_dimensions(noise: float) -> None:
    found = [share_of_density(log_densities(D), 200, noise=noise, noise_scale="spread") for D in (16, 64, 128, 512)]
    assert max(found) - min(found) < 0.06


@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
def test_the_share_of_normal_log_densities_is_the_closed_form(noise: float) -> None:
    """At p = 0.5 two standard normals with correlation r are in the same half with probability 1/2 + arcsin(r) / pi."""
    log_f = 7.0 * torch.randn(20_000, generator=generator(1000)) - 300.0
    expected = 2 * math.asin(1 / math.sqrt(1 + noise**2)) / math.pi
    assert share_of_density(log_f, 10_000, noise=noise, noise_scale="spread") == pytest.approx(expected, abs=0.01)


def test_shifting_and_stretching_log_densities_changes_no_choice() -> None:
    log_f = log_densities(16)
    for stretched in (4 * log_f, log_f - 1024, 0.125 * log_f + 64):
        a, b = (PF.importance(f.double(), 0.5, generator(3), "spread") for f in (log_f, stretched))
        assert torch.equal(PF.retain(a, 100), PF.retain(b, 100))
    assert torch.equal(PF.importance(log_f, 0.0, generator(), "spread"), -log_f)


def test_one_outlier_does_not_make_the_others_noise() -> None:
    log_f = log_densities(16)
    with_outlier = torch.cat([log_f, log_f.new_tensor([-1e6])])
    found = share_of_density(with_outlier, 200, noise=0.3, noise_scale="spread")
    assert found == pytest.approx(share_of_density(log_f, 200, noise=0.3, noise_scale="spread"), abs=0.05)


def test_an_unknown_scale_is_named() -> None:
    words = r"unknown noise.scale 'wide'.*'paper'.*'spread'"
    with pytest.raises(ValueError, match=words):
        Density(noise_scale="wide")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        PF.importance(torch.zeros(3), noise_scale="wide")  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"noise": 0.0}, {"noise": 0.01}, {"noise": 1.0, "noise_scale": "spread"}])
def test_the_selector_counts_how_much_of_its_choice_is_the_densitys(settings: dict[str, Any]) -> None:
    selector, x = Density(16, **settings), torch.randn(200, 40, generator=generator(1))
    assert selector.diagnostics() == {}
    selector.learn(Candidates(32, generator(), x[:32]), None)
    expected = []
    with NoWaiting():
        for seed in range(5):
            batch = Candidates(32, generator(seed), x[32 + 32 * seed : 64 + 32 * seed])
            found = selector.select(batch, 20).indices
            assert selector.estimator is not None
            alone = PF.retain(-selector.estimator.log_density(batch.required_features), 20)
            expected.append((found, alone))
            selector.learn(batch, found)
    shares = [(len(set(a.tolist()) & set(b.tolist())) / 20 - 20 / 32) / (1 - 20 / 32) for a, b in expected]
    assert selector.diagnostics() == {"chosen_by_density": pytest.approx(sum(shares) / 5)}
    if settings["noise"] == 0:
        assert selector.diagnostics() == {"chosen_by_density": 1.0}


def test_stats_show_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 2))
    with ForwardBlocker(model, "1", 0.5, selector=Density(8, noise=0.0)) as blocker:
        assert blocker.stats.diagnostics == {}
        for _ in range(3):
            model(blocker(torch.randn(16, 6))).sum().backward()
        assert blocker.stats.diagnostics == {"chosen_by_density": 1.0}
    with ForwardBlocker(model, None, 0.5, selector="random") as blocker:
        assert blocker.stats.diagnostics == {}
