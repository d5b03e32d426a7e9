"""Bad input: an error that names the fix, nothing half-updated, and a blocker that still works afterwards."""

import pytest
import torch
from torch import nn

from halfway import Density, ForwardBlocker, Schedule
from tests.helpers.bad_input import Net, assert_trains, assert_unchanged, good, world

# ---------------------------------------------------------------------------------------------- making a blocker


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"at": "stm"}, ValueError, r"no module 'stm'.*closest are \['stem'"),
        ({"at": "twic"}, ValueError, "'twice'.*halfway layers"),
        ({"at": "zzz"}, ValueError, r"no module 'zzz'.*it has \['stem'"),
        ({"at": ""}, ValueError, "no module ''"),
        ({"at": nn.Linear(1, 1)}, ValueError, "Linear that is not a submodule of this Net"),
        ({"at": None}, ValueError, "'density' looks at features, so at= must name a layer"),
        ({"prune_ratio": -0.1}, ValueError, r"\[0, 1\).*-0.1"),
        ({"prune_ratio": 1.0}, ValueError, r"\[0, 1\).*1.0"),
        ({"prune_ratio": 2}, ValueError, r"\[0, 1\).*2"),
        ({"prune_ratio": float("nan")}, ValueError, r"\[0, 1\).*nan"),
        (
            {"selector": "densty"},
            ValueError,
            r"unknown selector 'densty'; did you mean density .*\(or pass a Selector\)",
        ),
        ({"selector": Density}, (TypeError, ValueError), "Selector"),
        ({"timeout": 0}, ValueError, "timeout, the seconds to wait for other ranks, must be positive, got 0"),
        ({"reuse": "rerun"}, ValueError, "unknown reuse 'rerun'.*'auto', 'replay', 'recompute'"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else None,
)
def test_wrong_arguments_are_refused_and_leave_the_model_free(arguments, kind, words):
    model = Net()
    before = world(model)
    with pytest.raises(kind, match=words):
        ForwardBlocker(model, **{"at": "cut", "prune_ratio": 0.5, **arguments})
    assert_unchanged(model, before)
    assert_trains(ForwardBlocker(model, "cut", 0.5), model)


def test_data_parallel_is_refused_in_favour_of_ddp():
    model = Net()
    before = world(model)
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        ForwardBlocker(nn.DataParallel(model), "cut", 0.5)
    assert_unchanged(model, before)
    assert_trains(ForwardBlocker(model, "cut", 0.5), model)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"noise": -1}, "noise"),
        ({"num_centroids": 0}, "num_centroids"),
        ({"dim": 0}, "dim"),
        ({"bandwidth": "wide"}, "unknown bandwidth 'wide'"),
        ({"update_rule": "mean"}, "unknown update_rule 'mean'"),
        ({"beta": 1.0}, "beta"),
    ],
)
def test_wrong_settings_of_the_selector_are_refused_when_it_is_made(settings, words):
    with pytest.raises(ValueError, match=words):
        Density(**settings)


# ----------------------------------------------------------------------------------------------- the first batch


@pytest.mark.parametrize("schedule", [None, Schedule(5, unit="step")], ids=["pruning", "before the window"])
@pytest.mark.parametrize("reuse", ["auto", "recompute"])
@pytest.mark.parametrize(
    ("at", "kind", "words"),
    [
        ("unused", ValueError, "'unused' never runs"),
        ("indices", TypeError, "'indices' returns torch.int64"),
        ("pair", TypeError, "'pair' returns a tuple"),
        ("folded", ValueError, r"'folded' returns shape \(6, 8\) for 8 samples; the batch must come first"),
        ("flat", ValueError, r"'flat' returns shape \(8,\) for 8 samples"),
    ],
    ids=["unused", "integers", "tuple", "batch not first", "one axis"],
)
def test_a_layer_that_is_no_place_to_cut_is_an_error_on_the_first_batch(at, kind, words, reuse, schedule):
    model = Net()
    blocker = ForwardBlocker(model, at, 0.5, reuse=reuse, schedule=schedule)
    x, y = good()
    values, before = x.clone(), world(model)
    for _ in range(2):
        with pytest.raises(kind, match=words):
            blocker(x, y)
        assert_unchanged(model, before)
    assert torch.equal(x, values)
    assert blocker.stats.steps == 0
    blocker.remove()
    assert_trains(ForwardBlocker(model, "cut", 0.5), model)


class Opaque:
    pass


X, Y = good()
BAD_BATCHES = {
    "empty": ((X[:0], Y[:0]), {}, ValueError, "batch is empty.*drop_last"),
    "nothing": ((), {}, TypeError, "by position.*or by name"),
    "mixed": ((X,), {"y": Y}, TypeError, "either by position.*or by name"),
    "different lengths": ((X, Y[:5]), {}, ValueError, r"batch\[1\] has 5 entries.*8 samples"),
    "different lengths, nested": ((X, {"a": [Y, Y[:5]]}), {}, ValueError, r"batch\[1\]\['a'\]\[1\] has 5 entries"),
    "different lengths, named": ((), {"x": X, "y": Y[:5]}, ValueError, "y has 5 entries"),
    "a list of another length": ((X, ["a"] * 5), {}, ValueError, r"batch\[1\] has 5 entries"),
    "ids of another length": ((X, Y), {"ids": torch.arange(5)}, ValueError, r"shape \(8,\), got shape \(5,\)"),
    "ids with two axes": ((X, Y), {"ids": torch.zeros(8, 1)}, ValueError, r"got shape \(8, 1\)"),
    "ids in a list": ((X, Y), {"ids": list(range(8))}, ValueError, "ids must be a tensor.*got a list"),
    "no tensor": ((3, "a"), {}, ValueError, "no tensor among the model's inputs"),
    "no tensor for the model": (({"scale": None}, Y), {}, ValueError, "no tensor among the model's inputs"),
    "too few positionals": (((), Y), {}, ValueError, "no tensor among the model's inputs"),
    "too many positionals": (((X, X, X), Y), {}, TypeError, r"forward\(x, scale\).*too many.*a tuple as positionals"),
    "a name the model needs is missing": (({"scale": X}, Y), {}, TypeError, "missing a required argument: 'x'"),
    "an unknown object": ((X, Opaque()), {}, TypeError, r"batch\[1\] is a Opaque"),
    "an unknown object, nested": ((X, {"meta": [1.0, Opaque()]}), {}, TypeError, r"batch\[1\]\['meta'\]\[1\]"),
    "a sparse tensor": ((X, Y.to_sparse()), {}, TypeError, r"batch\[1\] is not a dense tensor"),
    "names the model does not know": ((), {"image": X, "y": Y}, ValueError, r"forward\(x, scale\).*inputs="),
    "inputs out of range": ((X, Y), {"inputs": 2}, ValueError, "positions in the batch of 2 parts"),
    "inputs that are not in the batch": ((), {"x": X, "inputs": ["z"]}, ValueError, r"\['z'\].*\['x'\]"),
}


@pytest.mark.parametrize("when", ["first batch", "later"])
@pytest.mark.parametrize("schedule", [None, Schedule(50, unit="step")], ids=["pruning", "before the window"])
@pytest.mark.parametrize("case", BAD_BATCHES)
def test_a_wrong_batch_is_refused_and_the_next_one_goes_through(case, schedule, when):
    parts, named, kind, words = BAD_BATCHES[case]
    model = Net()
    blocker = ForwardBlocker(model, "cut", 0.5, schedule=schedule)
    if when == "later":
        model(blocker(*good())[0])
    before, stats = world(model), blocker.stats
    with pytest.raises(kind, match=words):
        blocker(*parts, **named)
    assert_unchanged(model, before)
    assert blocker.stats == stats
    if schedule is None:
        assert_trains(blocker, model)
    else:
        x, _ = blocker(X, Y)
        assert x is X


def test_an_epoch_schedule_without_set_epoch_is_an_error():
    model = Net()
    blocker = ForwardBlocker(model, "cut", 0.5, schedule=Schedule(0, 5))
    before = world(model)
    with pytest.raises(RuntimeError, match=r"set_epoch.*unit='step'"):
        blocker(*good())
    assert_unchanged(model, before)
    blocker.set_epoch(0)
    assert_trains(blocker, model)


def test_a_negative_epoch_is_refused():
    model = Net()
    blocker = ForwardBlocker(model, "cut", 0.5, schedule=Schedule(0, 5))
    blocker.set_epoch(1)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        blocker.set_epoch(-1)
    assert blocker.state_dict()["epoch"] == 1
    assert_trains(blocker, model)


def test_a_removed_blocker_says_so():
    model = Net()
    blocker = ForwardBlocker(model, "cut", 0.5)
    state = blocker.state_dict()
    blocker.remove()
    before = world(model)
    for use in (lambda: blocker(*good()), lambda: blocker.set_epoch(0), lambda: blocker.load_state_dict(state)):
        with pytest.raises(RuntimeError, match="removed"):
            use()
    assert_unchanged(model, before)
