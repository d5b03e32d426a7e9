"""Beginning and end of a blocker: one for each model, and no trace of it when it is removed or forgotten."""

import copy
import gc
import io
import json
import weakref

import pytest
import torch

from halfway import ForwardBlocker, Schedule
from tests.helpers.training_loop import (
    Net,
    Plain,
    batches,
    hooks_of,
    identical,
    vectors,
)


def test_the_cut_may_be_given_as_a_module():
    model = Net()
    blocker = ForwardBlocker(model, model.block, 0.5)
    assert json.loads(blocker.state_dict()["config"])["at"] == "block"
    assert len(model(blocker(batches(1)[0][0]))) == 5
    with pytest.raises(ValueError, match="not a submodule"):
        ForwardBlocker(Net(), model.block, 0.5)


def test_two_blockers_on_one_model_are_refused_until_the_first_is_removed():
    model = Net()
    first = ForwardBlocker(model, "block", 0.5)
    with pytest.raises(ValueError, match="remove"):
        ForwardBlocker(model, "stem", 0.5)
    ForwardBlocker(Net(), "stem", 0.5)
    first.remove()
    first.remove()
    second = ForwardBlocker(model, "stem", 0.5)
    assert len(model(second(batches(1)[0][0]))) == 5


def test_the_end_of_a_with_block_removes_the_blocker():
    model = Net()
    with ForwardBlocker(model, "block", 0.5) as blocker:
        x = blocker(batches(1)[0][0])
        assert len(x) == 5
        assert "_call_impl" in vars(model)
    assert hooks_of(model) == []
    with pytest.raises(RuntimeError, match="removed"):
        blocker(batches(1)[0][0])


@pytest.mark.filterwarnings("ignore:halfway computes")
@pytest.mark.parametrize("reuse", ["auto", "replay", "recompute"])
@pytest.mark.parametrize("schedule", [None, Schedule(5)])
@pytest.mark.parametrize("called", [False, True], ids=["model not called", "model called"])
def test_remove_leaves_no_trace_in_the_model(reuse, schedule, called):
    model = Net()
    with ForwardBlocker(model, "block", 0.5, reuse=reuse, schedule=schedule) as blocker:
        blocker.set_epoch(0)
        x = blocker(batches(1)[0][0])
        if called:
            model(x)
            assert hooks_of(model) == []
        elif schedule is None and reuse != "recompute":
            assert "_call_impl" in vars(model)
    assert hooks_of(model) == []
    ForwardBlocker(model, "block", 0.5)


@pytest.mark.filterwarnings("ignore:halfway computes")
def test_an_error_in_the_loop_passes_through_the_with_block_of_a_demanded_replay():
    model = Net()

    def loop():
        with ForwardBlocker(model, "block", 0.5, reuse="replay") as blocker:
            return len(blocker(batches(1)[0][0])) // 0

    with pytest.raises(ZeroDivisionError):
        loop()
    assert hooks_of(model) == []


@pytest.mark.filterwarnings("ignore:halfway computes")
@pytest.mark.parametrize("reuse", ["auto", "recompute"])
@pytest.mark.parametrize("schedule", [None, Schedule(5)])
@pytest.mark.parametrize("called", [False, True], ids=["model not called", "model called"])
def test_a_blocker_that_is_forgotten_leaves_no_trace_in_the_model(reuse, schedule, called):
    model = Net()
    blocker = ForwardBlocker(model, "block", 0.5, reuse=reuse, schedule=schedule)
    blocker.set_epoch(0)
    x = blocker(batches(1)[0][0])
    if called:
        model(x)
    alive = weakref.ref(blocker)
    del blocker
    gc.collect()
    assert alive() is None
    assert hooks_of(model) == []
    ForwardBlocker(model, "block", 0.5)


def test_a_forward_that_is_already_patched_stays_patched():
    model = Plain()
    calls = []
    inner = model.forward

    def patched(x):
        calls.append(1)
        return inner(x)

    model.forward = patched
    blocker = ForwardBlocker(model, "stem", 0.5)
    for x, _ in vectors(2):
        model(blocker(x))
    assert blocker.stats.steps_replayed == 2
    blocker.remove()
    assert model.forward is patched
    assert calls


def test_a_model_can_be_copied_and_saved_after_a_step():
    model = Net()
    blocker = ForwardBlocker(model, "block", 0.5)
    model(blocker(batches(1)[0][0]))
    copied = copy.deepcopy(model)
    assert identical(copied, model)
    torch.save(model, io.BytesIO())
