"""The state of a blocker: training goes on with it as without a stop, and a state that does not fit is refused."""

import copy
import io

import pytest
import torch

from halfway import Density, ForwardBlocker, Schedule
from tests.helpers.bad_input import Net, assert_trains, assert_unchanged, good, world
from tests.helpers.training_loop import Plain, train_step, vectors


@pytest.mark.parametrize("interrupted", [0, 1, 5])
def test_a_saved_state_continues_with_identical_selections(interrupted):
    data = vectors(10)

    def start():
        torch.manual_seed(0)
        model = Plain()
        blocker = ForwardBlocker(
            model, "stem", 0.5, selector=Density(8, noise=0.1), schedule=Schedule(1, unit="step"), seed=4
        )
        return model, blocker, torch.optim.SGD(model.parameters(), 0.05)

    def run(model, blocker, optimizer, data):
        chosen = []
        for x, y in data:
            train_step(model, optimizer, *blocker(x, y))
            chosen.append(blocker.last.indices.tolist() if blocker.last else None)
        return chosen

    model, blocker, optimizer = start()
    uninterrupted = run(model, blocker, optimizer, data)

    model, blocker, optimizer = start()
    run(model, blocker, optimizer, data[:interrupted])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "blocker": blocker.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed, second, optimizer = start()
    resumed.load_state_dict(state["model"])
    second.load_state_dict(state["blocker"])
    assert second.stats == blocker.stats
    assert run(resumed, second, optimizer, data[interrupted:]) == uninterrupted[interrupted:]
    assert second.stats.samples_seen == 100


def test_the_state_remembers_the_epoch():
    model = Plain()
    with ForwardBlocker(model, "stem", 0.5, schedule=Schedule(1, 3)) as blocker:
        blocker.set_epoch(2)
        state = blocker.state_dict()
    blocker = ForwardBlocker(model, "stem", 0.5, schedule=Schedule(1, 3))
    blocker.load_state_dict(state)
    assert len(model(blocker(vectors(1)[0][0]))) == 5


# ------------------------------------------------------------------------------------- a state that does not fit


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
