"""What cannot work is an error when the blocker is made, and it names the fix; what can be misread is said."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import halfway
from halfway import Density, ForwardBlocker, Random, Schedule
from halfway.samplers import RS2, InfoBatch


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def trains(model: nn.Module, at: Any = "1", **settings: Any) -> None:
    """A blocker can be made after all, and a step goes through."""
    with ForwardBlocker(model, at, 0.5, **settings) as blocker:
        assert len(model(blocker(torch.randn(8, 6)))) == 4


# ------------------------------------------------------------------------------------------------------- lazy layers


class Wrapped(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.head = part, nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.part(x))


LAZY: dict[str, tuple[Any, str, str]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LazyLinear(3)), "2", "LazyLinear"),
    "first": (lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3)), "0", "LazyLinear"),
    "norm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.LazyBatchNorm1d(), nn.Linear(8, 3)), "1", "LazyBatchNorm1d"),
    "deep": (lambda: Wrapped(nn.Sequential(nn.Identity(), nn.LazyLinear(8))), "part.1", "LazyLinear"),
    "itself": (lambda: nn.LazyLinear(3), "the model", "LazyLinear"),
}


@pytest.mark.parametrize("selector", ["density", "random", "loss"])
@pytest.mark.parametrize("case", LAZY)
def test_a_lazy_layer_is_an_error_that_says_to_call_the_model_first(case: str, selector: str) -> None:
    make, name, kind = LAZY[case]
    model = make()
    at = None if selector == "random" else "0"
    with pytest.raises(ValueError, match=rf"weights of '{name}' do not exist yet.*{kind}.*call the model once"):
        ForwardBlocker(model, at, 0.5, selector=selector)
    with torch.no_grad():
        model(torch.randn(2, 6))
    trains(model, None, selector="random")


def test_lazy_layers_of_a_compiled_model_are_found_by_their_own_names() -> None:
    model = torch.compile(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3)), backend="eager")
    with pytest.raises(ValueError, match="weights of '0' do not exist yet"):
        ForwardBlocker(model, "0", 0.5)


# ------------------------------------------------------------------------------------------------------- TorchScript


def scripted(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(model)


def traced(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, torch.randn(2, 6))


@pytest.mark.parametrize("how", [scripted, traced])
@pytest.mark.parametrize("selector", ["density", "random", "loss"])
def test_a_model_of_torchscript_is_an_error_that_says_what_to_do(how: Any, selector: str) -> None:
    model = network()
    with pytest.raises(TypeError, match=r"Sequential is compiled by TorchScript.*Python model it was made from"):
        ForwardBlocker(how(model), None if selector == "random" else "1", 0.5, selector=selector)
    trains(model)


@pytest.mark.parametrize("how", [scripted, traced])
def test_a_cut_of_torchscript_is_an_error_and_a_part_behind_the_cut_is_none(how: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 6), how(nn.Linear(6, 6)), nn.Linear(6, 3))
    with pytest.raises(TypeError, match=r"layer '1' is compiled by TorchScript.*cut at a layer around it"):
        ForwardBlocker(model, "1", 0.5)
    trains(model, "0")


# ------------------------------------------------------------------------------------------------------- wrong types


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"at": 0}, "at must be the name of a layer.*got 0; .*at='0'"),
        ({"at": 1.5}, "at must be the name of a layer, the layer itself or None, got 1.5"),
        ({"at": ["1"]}, r"at must be the name of a layer.*got \['1'\]"),
        ({"at": nn.Linear}, "at must be the name of a layer.*got <class"),
        ({"schedule": (5, 80)}, r"schedule must be a halfway.Schedule, as Schedule\(5, 80\), got \(5, 80\)"),
        ({"schedule": [5, None]}, r"as Schedule\(5, None\), got \[5, None\]"),
        ({"schedule": 5}, r"schedule must be a halfway.Schedule, as Schedule\(start, stop\), got 5"),
        ({"schedule": {"start": 5}}, r"schedule must be a halfway.Schedule.*got \{'start': 5\}"),
        ({"schedule": Schedule}, "schedule must be a halfway.Schedule.*got <class"),
        ({"selector": Density}, r"class Density; pass a Selector made of it: Density\(\)"),
        ({"selector": Random}, r"class Random; pass a Selector made of it: Random\(\)"),
        ({"selector": None}, r"selector must be a name or a Selector, got None; the names are \['auto', 'balanced'"),
        ({"selector": ["density"]}, r"selector must be a name or a Selector, got \['density'\]"),
        ({"selector": 0.5}, "selector must be a name or a Selector, got 0.5"),
        ({"model": torch.relu}, "model must be an nn.Module, got a builtin"),
        ({"model": nn.Linear}, "model must be an nn.Module, got a type"),
    ],
    ids=lambda v: f"{next(iter(v))} {type(next(iter(v.values()))).__name__}" if isinstance(v, dict) else "",
)
def test_an_argument_of_the_wrong_type_is_named_with_its_fix(arguments: dict[str, Any], words: str) -> None:
    model = network()
    with pytest.raises(TypeError, match=words):
        ForwardBlocker(**{"model": model, "at": "1", "prune_ratio": 0.5, **arguments})
    trains(model)


@pytest.mark.parametrize("schedule", [(5, 80), [0, 3], 5, "0-5"])
def test_samplers_want_a_schedule_too(schedule: Any) -> None:
    for sampler in (RS2, InfoBatch):
        with pytest.raises(TypeError, match="schedule must be a halfway"):
            sampler(12, 0.5, schedule=schedule)


@pytest.mark.parametrize(
    "window", [(0.1, 0.9), (0.0, 1.0), (5, 0.9), (5.0, None), (0, float("inf")), ("5", 80), (True, 5)]
)
@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_fractions_in_a_schedule_are_an_error_that_says_what_to_multiply(window: Any, unit: Any) -> None:
    words = rf"(start|stop) must be a whole number, got .*counts {unit}s.*Schedule\(int\(0.1 \* {unit}s\), int"
    with pytest.raises(TypeError, match=words):
        Schedule(*window, unit=unit)


# ---------------------------------------------------------------------------------------------- changed at run time


def test_the_ratio_can_be_changed_between_batches() -> None:
    model = network()
    blocker = ForwardBlocker(model, "1", 0.5)
    for ratio, retained in ((0.25, 6), (torch.tensor(0.75), 2), (0, 8), (0.5, 4)):
        blocker.prune_ratio = ratio
        assert type(blocker.prune_ratio) is float
        assert len(model(blocker(torch.randn(8, 6)))) == retained


@pytest.mark.parametrize("ratio", [2, 1, -0.1, float("nan"), "0.5", None, [0.5], torch.rand(2)])
def test_a_ratio_that_is_none_is_refused_at_run_time_and_the_old_one_stays(ratio: Any) -> None:
    model = network()
    blocker = ForwardBlocker(model, "1", 0.5)
    with pytest.raises((ValueError, TypeError), match="prune_ratio"):
        blocker.prune_ratio = ratio
    assert blocker.prune_ratio == 0.5
    assert len(model(blocker(torch.randn(8, 6)))) == 4


def test_a_blocker_prints_what_it_is() -> None:
    model = network()
    blocker = ForwardBlocker(model, model[1], 0.4, schedule=Schedule(5, 80))
    assert repr(blocker) == (
        "ForwardBlocker(Sequential, at='1', prune_ratio=0.4, selector='density', "
        "schedule=Schedule(start=5, stop=80, unit='epoch'), reuse='auto')"
    )
    blocker.prune_ratio = 0.25
    assert "prune_ratio=0.25" in repr(blocker)
    blocker.remove()
    assert repr(blocker).endswith("reuse='auto', removed)")
    for selector in ("random", "loss"):
        with ForwardBlocker(model, None, 0.5, selector=selector, reuse="recompute") as other:
            assert "at=None" in repr(other)
            assert f"selector={selector!r}" in repr(other)
            assert "reuse='recompute'" in repr(other)


def test_what_a_blocker_is_made_with_can_still_be_asked_of_its_signature() -> None:
    """Tools and editors look there."""
    import inspect

    parameters = inspect.signature(halfway.ForwardBlocker).parameters
    assert list(parameters)[:4] == ["model", "at", "prune_ratio", "selector"]
    assert list(inspect.signature(Density).parameters)[:3] == ["num_centroids", "dim", "noise"]


def test_a_cut_that_a_selector_of_outputs_does_not_use_is_said() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    with pytest.warns(UserWarning, match=r"'loss' looks at the model's output, so the cut at='0' is not used"):
        halfway.ForwardBlocker(model, "0", 0.5, selector="loss").remove()
    with pytest.raises(ValueError, match="no module"):  # a wrong name is one whatever the selector
        halfway.ForwardBlocker(model, "nothing", 0.5, selector="loss")
