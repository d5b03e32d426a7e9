"""Trying a user's training so that it later runs as it would have run anyway."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..engine.sandbox import HostRandom, TorchRandom, put_back

# Where a DataLoader and the samplers of torch keep what they draw from.
_PARTS = ("sampler", "batch_sampler", "dataset")
_DEPTH = 3


@contextlib.contextmanager
def untouched(loader: Any, device: torch.device) -> Iterator[None]:
    """What is drawn in here is drawn again afterwards: global generators, and the loader's own state.

    The loader's own state is that of the generators (torch's, NumPy's and Python's) that are attributes of it, of its
    samplers and of its data set, and whatever these save in a `state_dict`. A loader that keeps its workers gets its
    old ones back, so that an epoch that is under way is not lost. Anything else that they count cannot be put back.
    """
    host_random, torch_random = HostRandom(), TorchRandom(device)
    parts = list(_parts(loader))
    held = [value for part in parts for value in getattr(part, "__dict__", {}).values()]
    generators = [(g, g.get_state()) for g in held if isinstance(g, torch.Generator)]
    on_the_host = [(put, g, state) for g in held for put, state in _of_the_host(g)]
    workers = _keeps_workers(loader)
    before = loader._iterator if workers else None
    if workers:
        loader._iterator = None
    states = [(part, state) for part in parts if (state := _state_of(part)) is not None]
    try:
        yield
    finally:
        if workers:
            loader._iterator = before
        for part, state in states:
            part.load_state_dict(state)
        put_back(generators)
        for put, generator, drawn in on_the_host:
            put(generator, drawn)
        host_random.restore()
        torch_random.restore()


def _parts(thing: Any, depth: int = 0) -> Iterator[Any]:
    """The loader and its samplers, each once."""
    found: dict[int, Any] = {id(thing): thing}
    if depth < _DEPTH:
        for name in _PARTS:
            part = getattr(thing, name, None)
            if part is not None and not isinstance(part, (list, tuple, torch.Tensor)):
                found.update({id(each): each for each in _parts(part, depth + 1)})
    yield from found.values()


@contextlib.contextmanager
def gradients_kept(model: torch.nn.Module) -> Iterator[None]:
    """Copies are trained in here, but a loss function may hold the model itself (to keep its weights small, say), and
    then a backward pass reaches it: its gradients are put back."""
    kept = {p: p.grad for p in model.parameters()}
    for p in kept:
        p.grad = None  # or the old ones would be added to
    try:
        yield
    finally:
        for p, gradient in kept.items():
            p.grad = gradient


def _of_the_host(value: Any) -> list[tuple[Callable[[Any, Any], Any], Any]]:
    """How to put the state of a generator back, and the state; nothing for anything else."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # which has no state
        return [(random.Random.setstate, value.getstate())]
    numpy = sys.modules.get("numpy.random")  # only if somebody uses it
    if numpy is None:
        return []
    if isinstance(value, numpy.RandomState):
        return [(numpy.RandomState.set_state, value.get_state())]
    if isinstance(value, numpy.Generator):
        return [(lambda generator, state: setattr(generator.bit_generator, "state", state), value.bit_generator.state)]
    return []


def _state_of(part: Any) -> Any:
    """A copy of what it saves; None if it saves nothing."""
    # Not of modules: a data set may hold a network, which nothing here changes.
    stateful = callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))
    if not stateful or isinstance(part, torch.nn.Module):
        return None
    try:
        return copy.deepcopy(part.state_dict())
    except Exception:  # some have the method, but nothing to save (Accelerate's loader), or not before a first pass
        return None


def _keeps_workers(loader: Any) -> bool:
    return isinstance(loader, torch.utils.data.DataLoader) and bool(loader.persistent_workers)
