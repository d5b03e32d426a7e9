"""Recordings are freed as soon as nobody can need them, whatever happens."""

import gc
import weakref

import pytest
import torch

from tests.helpers.replays import blocked, gradients, plain_net


def recorded_tensors(blocker):
    tape = blocker._engine._pending.probe.tape
    return [weakref.ref(o) for e in tape.entries for o in e.outputs if isinstance(o, torch.Tensor)]


def alive(references):
    gc.collect()
    return sum(r() is not None for r in references)


def test_recordings_are_freed_when_they_have_been_replayed(x):
    model = plain_net()
    blocker = blocked(model)
    retained = blocker(x)
    recorded = recorded_tensors(blocker)
    assert alive(recorded) == 2
    seen = []
    model[2].register_forward_hook(lambda *_: seen.append(alive(recorded)))
    output = model(retained)
    assert seen == [0]
    assert output.requires_grad


def test_recordings_are_freed_when_the_forward_raises(x):
    model = plain_net()
    blocker = blocked(model)
    retained = blocker(x)
    recorded = recorded_tensors(blocker)

    def fail(*_):
        raise RuntimeError("from the user's forward")

    handle = model[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="from the user's forward"):
        model(retained)
    handle.remove()
    assert alive(recorded) == 0
    assert "forward" not in vars(model)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    found = gradients(model, blocker(x))
    assert blocker.stats.steps_replayed == 1
    assert found


def test_recordings_are_freed_when_the_retained_samples_are_dropped(x):
    model = plain_net()
    blocker = blocked(model)
    retained = blocker(x)
    recorded = recorded_tensors(blocker)
    assert alive(recorded) == 2
    del retained
    assert alive(recorded) == 0
    with pytest.warns(UserWarning, match="before the blocker"):
        assert blocker.stats.steps_recomputed == 1


def test_an_interrupt_in_the_shallow_part_leaves_nothing_behind(x):
    model = plain_net()
    blocker = blocked(model)
    retained = blocker(x)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(retained)
    handle.remove()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert "forward" not in vars(model)
    assert not model._forward_pre_hooks
    assert not model[2]._forward_hooks
