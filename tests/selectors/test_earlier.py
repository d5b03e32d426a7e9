"""States and settings that halfway 0.1.0 wrote are those of today's selectors."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from halfway import ForwardBlocker
from halfway.selectors import (
    Balanced,
    BalancedRemembered,
    Density,
    DivBS,
    LastLoss,
    LastLossHard,
    Loss,
    LossRank,
    Selector,
)
from halfway.selectors.earlier import config_today, sections_today, settings_today

N = 4
# Selector of today, where it looks, and what 0.1.0 wrote: the selector's name and settings, and its state.
_BALANCED = {
    "grid": 2,
    "dim": 3,
    "module": None,
    "use_loss": True,
    "num_samples": N,
    "channel_dim": None,
    "target": None,
}
_LOSSES = torch.tensor([[0.5], [float("nan")], [2.0], [1.0]])
WRITTEN: dict[str, tuple[Selector, str | None, str, dict[str, Any], dict[str, Any]]] = {
    "balanced": (
        Balanced(num_samples=N),
        "0",
        "balanced",
        {"features": "cut", **_BALANCED, "dim": 64},
        {"losses": _LOSSES},
    ),
    "balanced_remembered": (
        BalancedRemembered(dim=3, num_samples=N),
        None,
        "balanced",
        {"features": "remembered", **_BALANCED},
        {"losses": _LOSSES, "features": torch.arange(12.0).reshape(4, 3), "width": 3},
    ),
    "loss": (Loss(), None, "loss", {"loss_fn": None, "target": None, "sampling": "top", "pressure": 100.0}, {}),
    "loss_rank": (
        LossRank(pressure=20.0),
        None,
        "loss",
        {"loss_fn": None, "target": None, "sampling": "rank", "pressure": 20.0},
        {},
    ),
    "last_loss": (
        LastLoss(temperature=2.0, num_samples=N),
        None,
        "last_loss",
        {"mode": "soft", "temperature": 2.0, "num_samples": N},
        {"losses": _LOSSES},
    ),
    "last_loss_hard": (
        LastLossHard(num_samples=N),
        None,
        "last_loss",
        {"mode": "hard", "temperature": 1.0, "num_samples": N},
        {"losses": _LOSSES},
    ),
    "density": (
        Density(2, 3),
        "0",
        "density",
        {
            "num_centroids": 2,
            "bandwidth": "silverman",
            "update_rule": "convex",
            "kernel_weights": True,
            "beta": 0.01,
            "dim": 3,
            "noise": 0.01,
            "channel_dim": None,
        },
        {"centroids": torch.arange(6.0).reshape(2, 3), "counts": torch.tensor([3, 4]), "width": 3},
    ),
    "divbs": (DivBS(), None, "divbs", {"loss_fn": None, "target": None}, {}),
}


def written(at: str | None, name: str, settings: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """`ForwardBlocker.state_dict()` of 0.1.0."""
    config = {"at": at or "", "prune_ratio": 0.5, "seed": 0, "selector": name}
    config |= {f"selector.{key}": value for key, value in settings.items()}
    config |= {"schedule.start": 0, "schedule.stop": None, "schedule.unit": "epoch"}
    counters = {"steps": 7, "pruned_steps": 7, "seen": 28, "retained": 14, "replayed_steps": 7, "recomputed": "{}"}
    counters |= {"operations_replayed": 7, "operations_computed": 0, "spent": 16.0}
    return {
        "version": 1,
        "config": json.dumps(config),
        "epoch": 3,
        "ranks": 1,
        "autocast": "",
        "counters": counters,
        "selector": state,
    }


@pytest.mark.parametrize("case", WRITTEN)
def test_a_state_of_0_1_0_loads(case: str) -> None:
    selector, at, name, settings, state = WRITTEN[case]
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with ForwardBlocker(model, at, 0.5, selector=selector) as blocker:
        blocker.load_state_dict(written(at, name, settings, state))
        found = blocker.state_dict()
        assert found["counters"]["steps"] == 7
        assert found["selector"].keys() == state.keys()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(found["selector"][key], value, equal_nan=True)
            else:
                assert found["selector"][key] == value
        blocker.load_state_dict(found)  # and what it writes today


def test_a_state_of_0_1_0_in_another_mode_is_refused() -> None:
    _, at, name, settings, state = WRITTEN["last_loss_hard"]
    blocker = ForwardBlocker(nn.Linear(3, 2), at, 0.5, selector=LastLoss(num_samples=N))
    with pytest.raises(ValueError, match="selector: 'last_loss_hard' in the state, 'last_loss' here"):
        blocker.load_state_dict(written(at, name, settings, state))


def test_what_is_no_configuration_is_left_to_be_refused() -> None:
    for config in (None, "{", "[1]", "{}", 7):
        assert config_today(config) == config


def test_settings_of_today_stay_as_they_are() -> None:
    assert settings_today("loss", {"target": 1}) == ("loss", {"target": 1})
    assert settings_today("own", {"mode": "hard"}) == ("own", {"mode": "hard"})


@pytest.mark.parametrize(
    ("method", "sections", "today"),
    [
        ("loss", {"loss": {"sampling": "rank", "pressure": 5.0}}, ("loss_rank", {"loss_rank": {"pressure": 5.0}})),
        ("loss_rank", {"loss": {"pressure": 5.0}}, ("loss_rank", {"loss_rank": {"pressure": 5.0}})),
        (
            "last_loss",
            {"last_loss": {"mode": "soft", "temperature": 2}},
            ("last_loss", {"last_loss": {"temperature": 2}}),
        ),
        (
            "balanced_remembered",
            {"balanced": {"dim": 8, "use_loss": False}, "density": {"noise": 0.1}},
            ("balanced_remembered", {"density": {"noise": 0.1}, "balanced_remembered": {"dim": 8, "use_loss": False}}),
        ),
        ("pfb", {"last_loss": {"temperature": 2.0}}, ("pfb", {"last_loss": {"temperature": 2.0}})),
        ("balanced", {"balanced": {"features": "cut"}}, ("balanced", {})),
    ],
)
def test_recipes_of_0_1_0_are_read(method: str, sections: dict[str, Any], today: Any) -> None:
    assert sections_today(method, sections) == today
