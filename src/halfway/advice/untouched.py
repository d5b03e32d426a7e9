"""Reading a user's loader so that it later yields what it would have yielded anyway."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch

from ..engine.sandbox import HostRandom, TorchRandom, put_back

# Where a DataLoader and the samplers of torch keep what they draw from.
_PARTS = ("sampler", "batch_sampler", "dataset")
_DEPTH = 3


@contextlib.contextmanager
def untouched(loader: Any, device: torch.device) -> Iterator[None]:
    """What is drawn in here is drawn again afterwards: global generators, and the loader's own state.

    The loader's own state is that of its generators, and whatever it and its samplers save in a `state_dict`. A loader
    that keeps its workers gets its old ones back, so that an epoch that is under way is not lost.
    """
    host_random, torch_random = HostRandom(), TorchRandom(device)
    parts = list(_parts(loader))
    generators = [(g, g.get_state()) for g in map(_generator, parts) if g is not None]
    workers = _keeps_workers(loader)
    before = loader._iterator if workers else None
    if workers:
        loader._iterator = None
    states = [(part, copy.deepcopy(part.state_dict())) for part in parts if _has_state(part)]
    try:
        yield
    finally:
        if workers:
            loader._iterator = before
        for part, state in states:
            part.load_state_dict(state)
        put_back(generators)
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


def _generator(part: Any) -> torch.Generator | None:
    found = getattr(part, "generator", None)
    return found if isinstance(found, torch.Generator) else None


def _has_state(part: Any) -> bool:
    # Not of modules: a data set may hold a network, which nothing here changes.
    stateful = callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))
    return stateful and not isinstance(part, torch.nn.Module)


def _keeps_workers(loader: Any) -> bool:
    return isinstance(loader, torch.utils.data.DataLoader) and bool(loader.persistent_workers)
