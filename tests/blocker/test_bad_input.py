"""Bad input: an error that names the fix, nothing half-updated, and a blocker that still works afterwards."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfway import Density, ForwardBlocker, Schedule


class Net(nn.Module):
    """Shallow: stem, norm, dropout, cut. Some of its layers are no place to cut."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.cut = nn.Linear(6, 6)
        self.unused = nn.Linear(2, 2)
        self.twice = nn.Linear(6, 6)
        self.indices = Indices()
        self.pair = Pair()
        self.folded = Folded()
        self.flat = Flat()
        self.head = nn.Linear(6, 3)

    def forward(self, x, scale=None):
        x = self.cut(self.drop(self.norm(self.stem(x)))) * (1 + 0.1 * random.random())
        if scale is not None:
            x = x * scale
        x = self.twice(self.twice(x))
        x = x + 0.01 * self.indices(x) + self.pair(x)[0]
        return self.head(self.folded(x).T) + self.flat(x).mean()


class Indices(nn.Module):
    def forward(self, x):
        return x.argmax(1, keepdim=True)


class Pair(nn.Module):
    def forward(self, x):
        return x, 2 * x


class Folded(nn.Module):
    def forward(self, x):
        return x.T


class Flat(nn.Module):
    def forward(self, x):
        return x.sum(1)


def good(size=8):
    g = torch.Generator().manual_seed(size)
    return torch.randn(size, 4, generator=g), torch.randint(3, (size,), generator=g)


def with_nan(size=8):
    x, y = good(size)
    x[3, 1] = float("nan")
    return x, y


def world(model):
    """All that an error must leave as it was, as something that `==` compares."""
    numpy_state = np.random.get_state()  # noqa: NPY002
    hooks = [
        (name, kind, len(getattr(module, kind)))
        for name, module in model.named_modules()
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    ]
    return {
        "parameters and buffers": {k: v.tolist() for k, v in model.state_dict().items()},
        "gradients": [p.grad is None for p in model.parameters()],
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": (numpy_state[1].tolist(), numpy_state[2:]),
        "hooks": hooks,
        "global hooks": len(nn.modules.module._global_forward_pre_hooks),
        "methods": [n for n, m in model.named_modules() if {"forward", "_call_impl"} & vars(m).keys()],
    }


def assert_unchanged(model, before):
    for what, value in world(model).items():
        assert value == before[what], f"{what} changed"


def assert_trains(blocker, model):
    """A good batch goes through, is pruned, and gives gradients."""
    seen = blocker.stats.samples_seen
    x, y = blocker(*good())
    assert len(x) == len(y) == 4
    F.cross_entropy(model(x), y).backward()
    assert all(p.grad is not None for p in model.cut.parameters())
    assert blocker.stats.samples_seen == seen + 8


# ------------------------------------------------------------------------------------------ making a blocker


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
        ({"selector": "densty"}, ValueError, r"unknown selector 'densty'; did you mean 'density'.*'random'"),
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


# ------------------------------------------------------------------------------------------- the first batch


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


# ----------------------------------------------------------------------------------------------- the model fails


class Picky(Net):
    """Raises, in its shallow part after a random draw, on batches of one of the sizes it does not like."""

    def __init__(self, *sizes):
        super().__init__()
        self.sizes = sizes

    def forward(self, x):
        x = self.drop(self.norm(self.stem(x)))
        if len(x) in self.sizes:
            raise ArithmeticError("this model does not like its batch")
        return self.head(self.cut(x))


@pytest.mark.parametrize(("size", "reuse"), [(8, "auto"), (8, "recompute"), (4, "auto")])
def test_a_forward_that_raises_on_the_first_batch_leaves_no_trace(size, reuse):
    model = Picky(size)
    blocker = ForwardBlocker(model, "cut", 0.5, reuse=reuse)
    before = world(model)
    with pytest.raises(ArithmeticError, match="does not like"):
        blocker(*good())
    assert_unchanged(model, before)
    model.sizes = ()
    assert_trains(blocker, model)


def test_a_forward_that_raises_later_leaves_no_trace():
    model = Picky(10)
    blocker = ForwardBlocker(model, "cut", 0.5)
    assert_trains(blocker, model)
    before, stats = world(model), blocker.stats
    with pytest.raises(ArithmeticError, match="does not like"):
        blocker(*good(10))
    assert_unchanged(model, before)
    assert blocker.stats == stats
    assert_trains(blocker, model)


@pytest.mark.parametrize("schedule", [None, Schedule(1, unit="step")], ids=["pruning", "first pruned step"])
def test_a_forward_that_raises_on_the_retained_samples_of_a_later_step_counts_nothing(schedule):
    """Another batch size, so the step is rehearsed, and the rehearsal raises."""
    model = Picky()
    selector = Density(num_centroids=4)
    blocker = ForwardBlocker(model, "cut", 0.5, selector=selector, schedule=schedule)
    model(blocker(*good())[0])
    model.sizes = (6,)
    before, stats, last = world(model), blocker.stats, blocker.last
    learned = selector.estimator.counts.clone()
    with pytest.raises(ArithmeticError, match="does not like"):
        blocker(*good(12))
    assert_unchanged(model, before)
    assert blocker.stats == stats
    assert blocker.last is last
    assert torch.equal(selector.estimator.counts, learned)
    assert_trains(blocker, model)


# ----------------------------------------------------------------------------------------- values that are not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_features_that_are_not_finite_at_the_first_step_are_an_error_that_names_the_layer(value):
    model = Net()
    model.norm = nn.Identity()
    blocker = ForwardBlocker(model, "cut", 0.5, selector=Density(num_centroids=4))
    x, y = good()
    x[2, 1] = value
    before = world(model)
    with pytest.raises(FloatingPointError, match=r"'cut'.*not finite"):
        blocker(x, y)
    assert_unchanged(model, before)
    assert blocker.stats.steps == 0
    assert_trains(blocker, model)


def test_features_that_are_not_finite_at_the_first_step_before_the_window_are_an_error_too():
    model = Net()
    blocker = ForwardBlocker(model, "cut", 0.5, selector=Density(num_centroids=4), schedule=Schedule(1, unit="step"))
    with pytest.raises(FloatingPointError, match=r"'cut'.*not finite"):
        model(blocker(*with_nan())[0])


@pytest.mark.parametrize(
    "ask", [lambda b: b.set_epoch(1), lambda b: b.stats, lambda b: b.state_dict()], ids=["set_epoch", "stats", "state"]
)
@pytest.mark.parametrize("pruning", [True, False])
def test_features_that_are_not_finite_later_prune_at_random_and_are_reported_at_the_next_question(ask, pruning):
    model = Net()
    model.norm = nn.Identity()
    selector = Density(num_centroids=4)
    schedule = None if pruning else Schedule(50, unit="step")
    blocker = ForwardBlocker(model, "cut", 0.5, selector=selector, schedule=schedule)
    for _ in range(3):
        model(blocker(*good())[0])
    learned = copy.deepcopy(selector.estimator.state_dict())
    chosen = []
    for _ in range(4):
        x, _ = blocker(*with_nan())
        assert len(x) == (4 if pruning else 8)
        if pruning:
            assert blocker.last.importance.isfinite().all()
            chosen.append(blocker.last.indices.tolist())
        model(x)
    if pruning:
        assert len({tuple(c) for c in chosen}) > 1
    for name, value in selector.estimator.state_dict().items():
        assert torch.equal(value, learned[name])
    with pytest.raises(FloatingPointError, match=r"'cut'.*not finite"):
        ask(blocker)
    ask(blocker)
    x, _ = blocker(*good())
    model(x)
    assert selector.estimator.counts.sum() > learned["counts"].sum()


# ------------------------------------------------------------------------------------------ features that change


def test_features_of_another_width_are_refused_and_nothing_is_counted():
    class Widening(nn.Module):
        width = 6

        def __init__(self):
            super().__init__()
            self.cut = nn.Identity()
            self.head = nn.Linear(1, 3)

        def forward(self, x):
            return self.head(self.cut(x[:, : self.width]).mean(1, keepdim=True))

    model = Widening()
    selector = Density(num_centroids=2)
    blocker = ForwardBlocker(model, "cut", 0.5, selector=selector)
    x = torch.randn(8, 10)
    model(blocker(x))
    Widening.width = 9
    before, stats = world(model), blocker.stats
    counts = selector.estimator.counts.clone()
    with pytest.raises(ValueError, match=r"'cut' now have 9 channels.*made for 6.*channel_dim"):
        blocker(x)
    assert_unchanged(model, before)
    assert blocker.stats == stats
    assert torch.equal(selector.estimator.counts, counts)
    Widening.width = 6
    assert len(model(blocker(x))) == 4


# ----------------------------------------------------------------------------------------------------------- state


def trained(**changes):
    model = Net()
    settings = {"at": "cut", "prune_ratio": 0.5, "selector": Density(num_centroids=4), "seed": 1, **changes}
    blocker = ForwardBlocker(model, **settings)
    if blocker.schedule.unit == "epoch":
        blocker.set_epoch(0)
    for _ in range(3):
        model(blocker(*good())[0])
    return model, blocker


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"at": "stem"}, "at: 'cut' in the state, 'stem' here"),
        ({"prune_ratio": 0.25}, "prune_ratio: 0.5 in the state, 0.25 here"),
        ({"seed": 2}, "seed: 1 in the state, 2 here"),
        ({"selector": "random"}, "selector: 'density' in the state, 'random' here"),
        ({"selector": Density(num_centroids=5)}, "selector.num_centroids: 4 in the state, 5 here"),
        ({"selector": Density(num_centroids=4, noise=0.5)}, "selector.noise: 0.01 in the state, 0.5 here"),
        ({"schedule": Schedule(0, 9)}, "schedule.stop: None in the state, 9 here"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else None,
)
def test_the_state_of_another_configuration_is_refused_with_the_difference(changes, words):
    _, first = trained()
    model, second = trained(**changes)
    state, own = first.state_dict(), copy.deepcopy(second.state_dict())
    before = world(model)
    with pytest.raises(ValueError, match=words):
        second.load_state_dict(state)
    assert_unchanged(model, before)
    assert same_state(second.state_dict(), own)


def same_state(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def spoilt(state, **changes):
    return {**copy.deepcopy(state), **changes}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: None,
        lambda s: {},
        lambda s: {"model": 1},
        lambda s: spoilt(s, extra=1),
        lambda s: spoilt(s, version=99),
        lambda s: spoilt(s, config=None),
        lambda s: spoilt(s, config="{"),
        lambda s: spoilt(s, autocast="on nonsense"),
        lambda s: spoilt(s, counters={}),
        lambda s: spoilt(s, counters={**s["counters"], "nonsense": 1}),
        lambda s: spoilt(s, selector={"centroids": torch.ones(4, 6)}),
        lambda s: spoilt(s, selector={"nonsense": 1}),
        lambda s: spoilt(s, selector={"centroids": torch.ones(3, 6), "counts": torch.ones(3, dtype=torch.int64)}),
    ],
    ids=[
        "None",
        "empty",
        "of something else",
        "one key too many",
        "another version",
        "no config",
        "half a config",
        "unknown autocast",
        "no counters",
        "unknown counter",
        "half a selector",
        "not a selector",
        "another number of centroids",
    ],
)
def test_a_garbage_state_is_refused_as_a_whole(spoil):
    _, other = trained()
    model, blocker = trained()
    own, before = copy.deepcopy(blocker.state_dict()), world(model)
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        blocker.load_state_dict(spoil(other.state_dict()))
    assert_unchanged(model, before)
    assert same_state(blocker.state_dict(), own)
    assert_trains(blocker, model)
