"""Settings may come as NumPy's numbers, fractions, tensors: they are plain Python from the start, in every state."""

from __future__ import annotations

import decimal
import fractions
import inspect
import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from halfway import Density, DensityEstimator, ForwardBlocker, Schedule, selectors
from halfway.samplers import SAMPLERS
from halfway.selectors import SELECTORS, Candidates, Selector
from halfway.settings import as_number, plain_settings
from halfway.state.sample_memory import SampleMemory

N = 12
FLOATS = {
    "np.float16": np.float16,
    "np.float32": np.float32,
    "np.float64": np.float64,
    "np.longdouble": np.longdouble,
    "0-dim array": np.array,
    "0-dim tensor": torch.tensor,
    "0-dim bfloat16": lambda v: torch.tensor(v, dtype=torch.bfloat16),
    "parameter": lambda v: nn.Parameter(torch.tensor(float(v))),
    "Fraction": fractions.Fraction,
    "Decimal": decimal.Decimal,
}
INTS = {
    "np.int32": np.int32,
    "np.int64": np.int64,
    "np.uint8": np.uint8,
    "0-dim array": np.array,
    "0-dim tensor": torch.tensor,
}
# The settings of each class that are numbers, in values that every type above can hold.
SETTINGS: dict[Any, dict[str, Any]] = {
    selectors.Density: {
        "num_centroids": 4,
        "dim": 3,
        "noise": 0.5,
        "kernel_weights": True,
        "beta": 0.25,
        "channel_dim": 1,
    },
    selectors.DensityPublic: {"num_centroids": 4, "dim": 3, "noise": 0.5, "beta": 0.25},
    selectors.Auto: {"learned": 0.5, "times": 4.5, "floor": 0.25, "num_samples": N},
    selectors.Rotate: {"num_samples": N},
    selectors.ClassBalanced: {"q": 0.5, "target": 1},
    selectors.LastLoss: {"temperature": 0.5, "num_samples": N},
    selectors.LastLossHard: {"num_samples": N},
    selectors.LastLossProportional: {
        "floor": 0.25,
        "temperature": 0.5,
        "cap": 2.5,
        "num_classes": 3,
        "num_samples": N,
    },
    selectors.OrderDP: {"pool": 0.75, "num_samples": N},
    selectors.BalancedProportional: {
        "floor": 0.25,
        "temperature": 0.5,
        "cap": 2.5,
        "num_classes": 3,
        "dim": 3,
        "num_samples": N,
        "channel_dim": 1,
        "target": 1,
    },
    selectors.RhoRemembered: {"losses": torch.zeros(N), "temperature": 0.5, "use_loss": True},
    selectors.Balanced: {"grid": 1, "use_loss": True, "num_samples": N, "channel_dim": 1, "target": 1},
    selectors.BalancedRemembered: {"dim": 3, "use_loss": True, "num_samples": N, "channel_dim": 1, "target": 1},
    selectors.EarlyExit: {"num_classes": 3, "grid": 1, "dim": 4, "lr": 0.5, "channel_dim": 1, "target": 1},
    selectors.Proxy: {
        "model": torch.nn.Linear(6, 3),
        "lr": 0.5,
        "momentum": 0.5,
        "weight_decay": 0.25,
        "every": 2,
        "target": 1,
    },
    selectors.Loss: {"target": 1},
    selectors.LossRank: {"pressure": 2.5, "target": 1},
    selectors.SelectiveBackprop: {"beta": 0.5, "history": 8, "target": 1},
    selectors.GradNorm: {"uniform": 0.25, "target": 1},
    selectors.DivBS: {"target": 1},
    DensityEstimator: {"num_centroids": 4, "dim": 3, "kernel_weights": True, "beta": 0.25},
    SampleMemory: {"width": 2, "num_samples": N, "unknown": 0.5},
    **{cls: {"data": N, "prune_ratio": 0.25, "seed": 3, "timeout": 2.5, "shuffle": False} for cls in SAMPLERS.values()},
}
SETTINGS[SAMPLERS["infobatch"]] |= {"threshold": 0.5}
SETTINGS[SAMPLERS["ucb"]] |= {"alpha": 0.5, "c": 2.5, "period": 3}
SETTINGS[SAMPLERS["epsilon_greedy"]] |= {"alpha": 0.5, "epsilon": 0.25, "period": 3}
SETTINGS[SAMPLERS["dyn_unc"]] |= {"window": 3}
SETTINGS[SAMPLERS["rs2"]] |= {"replacement": False}


def other(value: Any, number: Any) -> Any:
    """The same number as somebody else's type."""
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return value
    if isinstance(value, bool):
        return np.bool_(value)
    kinds = INTS if isinstance(value, int) else FLOATS
    return kinds[number](value) if number in kinds else value


def settings_of(obj: Any) -> dict[str, Any]:
    if isinstance(obj, (DensityEstimator, SampleMemory)):
        return {k: v for k, v in vars(obj).items() if k in SETTINGS[type(obj)]}
    return obj.config() if isinstance(obj, Selector) else {**obj.config(), **obj._config()}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("number", [*dict.fromkeys([*FLOATS, *INTS])])
@pytest.mark.parametrize("cls", SETTINGS, ids=lambda c: c.__name__)
def test_settings_of_any_number_type_are_those_of_python(cls: Any, number: str) -> None:
    given = {name: other(value, number) for name, value in SETTINGS[cls].items()}
    found, expected = settings_of(cls(**given)), settings_of(cls(**SETTINGS[cls]))
    assert found == expected
    assert {k: type(v) for k, v in found.items()} == {k: type(v) for k, v in expected.items()}
    assert json.loads(json.dumps(found)) == found


def test_no_numeric_setting_is_left_out_above() -> None:
    """Whoever adds a selector, a sampler or a setting adds it here."""
    for cls in (*SELECTORS.values(), *SAMPLERS.values()):
        numeric = {
            name
            for name, p in inspect.signature(cls).parameters.items()
            if {"int", "float", "bool"} & {part.strip() for part in str(p.annotation).split("|")}
        }
        assert numeric <= SETTINGS.get(cls, {}).keys() | {"kernel_weights", "channel_dim", "target"}, cls


@pytest.mark.parametrize("number", FLOATS)
def test_a_blocker_made_of_any_numbers_trains_and_is_saved_and_loaded(number: str) -> None:
    model = network()
    whole = INTS.get(number, np.int64)
    blocker = ForwardBlocker(
        model,
        "1",
        FLOATS[number](0.5),
        selector=Density(num_centroids=whole(2), noise=FLOATS[number](0.25)),
        schedule=Schedule(whole(0), whole(9)),
        seed=whole(3),
        timeout=FLOATS[number](20),
    )
    for epoch in range(2):
        blocker.set_epoch(whole(epoch))
        for _ in range(3):
            model(blocker(torch.randn(8, 6))).sum().backward()
    file = io.BytesIO()
    torch.save(blocker.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert type(state["epoch"]) is int
    blocker.remove()
    same = ForwardBlocker(model, "1", 0.5, selector=Density(2, noise=0.25), schedule=Schedule(0, 9), seed=3, timeout=20)
    same.load_state_dict(state)
    assert same.stats.steps == 6


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_made_of_any_numbers_is_saved_and_loaded(name: str) -> None:
    cls = SAMPLERS[name]
    settings = SETTINGS[cls]
    sampler = cls(**{k: other(v, "0-dim tensor") for k, v in settings.items()}, schedule=Schedule(np.int64(0)))
    sampler.set_epoch(np.int64(1), skip=torch.tensor(2))
    state = sampler.state_dict()
    assert type(state["epoch"]) is int
    same = cls(**settings, schedule=Schedule(0))
    same.load_state_dict(state)
    same.set_epoch(1, skip=2)
    assert list(same) == list(sampler)


def test_the_same_numbers_train_the_same_way_whatever_their_type() -> None:
    chosen = []
    for seed, ratio in ((7, 0.5), (np.int64(7), np.float32(0.5)), (torch.tensor(7), fractions.Fraction(1, 2))):
        torch.manual_seed(0)
        model = network()
        blocker = ForwardBlocker(model, "1", ratio, seed=seed, selector=Density(num_centroids=4))
        rows = []
        for _ in range(4):
            model(blocker(torch.randn(8, 6)))
            assert blocker.last is not None
            rows.append(blocker.last.indices.tolist())
        chosen.append(rows)
    assert chosen[0] == chosen[1] == chosen[2]


# ----------------------------------------------------------------------------------------------------- wrong types


class Own(Selector):
    """As a user writes one."""

    name = "own"

    def __init__(self, strength: float = 1.0, steps: int = 3, free=None) -> None:  # type: ignore[no-untyped-def]
        self.strength, self.steps, self.free = strength, steps, free


MISTAKES = {
    "word as ratio": (lambda: blocked(prune_ratio="0.5"), "prune_ratio must be a number, got '0.5'"),
    "no ratio": (lambda: blocked(prune_ratio=None), "prune_ratio must be a number, got None"),
    "array as ratio": (
        lambda: blocked(prune_ratio=np.array([0.5])),
        r"prune_ratio must be a number, got array\(\[0.5\]\)",
    ),
    "tensor as ratio": (lambda: blocked(prune_ratio=torch.rand(2)), r"prune_ratio must be a number, got tensor\("),
    "complex ratio": (lambda: blocked(prune_ratio=0.5j), "prune_ratio must be a number, got 0.5j"),
    "fraction of a seed": (lambda: blocked(seed=0.5), "seed must be a whole number, got 0.5"),
    "float32 seed": (lambda: blocked(seed=np.float32(1)), "seed must be a whole number, got "),
    "word as timeout": (lambda: blocked(timeout="long"), "timeout must be a number, got 'long'"),
    "half an epoch": (lambda: blocked().set_epoch(0.5), "epoch must be a whole number, got 0.5"),
    "word as noise": (lambda: Density(noise="small"), "noise must be a number, got 'small'"),
    "no noise": (lambda: Density(noise=None), "noise must be a number, got None"),
    "half a centroid": (lambda: Density(num_centroids=2.5), "num_centroids must be a whole number, got 2.5"),
    "yes": (lambda: Density(num_centroids=True), "num_centroids must be a whole number, got True"),
    "word as yes": (lambda: Density(kernel_weights="no"), "kernel_weights must be True or False, got 'no'"),
    "estimator": (lambda: DensityEstimator(dim="3"), "dim must be a whole number, got '3'"),
    "optional": (lambda: selectors.Rotate("12"), "num_samples must be a whole number or None, got '12'"),
    "optional float": (lambda: selectors.SelectiveBackprop(beta="2"), "beta must be a number or None, got '2'"),
    "sampler": (lambda: SAMPLERS["ucb"](N, 0.5, c="1"), "c must be a number, got '1'"),
    "sampler's ratio": (lambda: SAMPLERS["rs2"](N, "0.5"), "prune_ratio must be a number, got '0.5'"),
    "sampler's seed": (lambda: SAMPLERS["rs2"](N, 0.5, seed="0"), "seed must be a whole number, got '0'"),
    "sampler's period": (lambda: SAMPLERS["ucb"](N, 0.5, period=2.5), "period must be a whole number, got 2.5"),
    "one's own": (lambda: Own("strong"), "strength must be a number, got 'strong'"),
    "target": (lambda: selectors.Loss(target=1.5), "target must be a whole number or a str or None, got 1.5"),
}


def blocked(**settings: Any) -> ForwardBlocker:
    return ForwardBlocker(network(), "1", **{"prune_ratio": 0.5, **settings})


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_no_number_is_named(mistake: str) -> None:
    call, words = MISTAKES[mistake]
    with pytest.raises(TypeError, match=words):
        call()


def test_a_selector_of_ones_own_gets_plain_numbers_too() -> None:
    own = Own(np.float32(0.5), steps=np.int64(2), free=np.float64(3))
    assert own.config() == {"strength": 0.5, "steps": 2, "free": 3.0}
    assert [type(v) for v in own.config().values()] == [float, int, float]
    assert inspect.signature(Own).parameters["steps"].default == 3


def test_a_setting_that_no_state_can_hold_is_an_error_when_the_blocker_is_made() -> None:
    class Choosy(Own):
        def select(self, candidates: Candidates, count: int) -> Any: ...

    words = r"setting 'selector.free' of a ForwardBlocker is .*object.*; let config\(\) return"
    with pytest.raises(TypeError, match=words):
        ForwardBlocker(network(), None, 0.5, selector=Choosy(free=object()))
    # Numbers that only `config` knows of are made plain where the state is written.
    blocker = ForwardBlocker(network(), None, 0.5, selector=Choosy(free=torch.tensor(2)))
    assert json.loads(blocker.state_dict()["config"])["selector.free"] == 2


def test_what_is_not_annotated_as_a_number_is_left_alone() -> None:
    seen: dict[str, Any] = {}

    class Holder:
        @plain_settings
        def __init__(self, *rest: int, name: str = "", data: list[int] | None = None, either: int | str = 0) -> None:
            seen.update(rest=rest, name=name, data=data, either=either)

    data = [np.int64(1)]
    Holder(1, 2, name="a", data=data, either="b")
    assert seen == {"rest": (1, 2), "name": "a", "data": data, "either": "b"}
    assert seen["data"] is data


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, True),
        (np.bool_(False), False),
        (2, 2),
        (np.uint8(3), 3),
        (0.5, 0.5),
        (np.array(7), 7),
        (np.array([7]), None),
        *((value, None) for value in ("1", None, 1j, torch.ones(1), np.str_("a"), object())),
    ],
)
def test_one_number_is_found_or_none(value: Any, number: Any) -> None:
    found = as_number(value)
    assert found == number
    assert type(found) is type(number)
