"""What a batch sampler cannot work with, refused when it is made."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SequentialSampler

from .. import selectors
from ..samplers.base import EpochSampler
from ..selectors import Selector

# Samplers of torch, and where they hold the data set.
_HOLDS: dict[type, str] = {
    SequentialSampler: "data_source",
    RandomSampler: "data_source",
    DistributedSampler: "dataset",
}


def needing_nothing(selector: str | Selector) -> Selector:
    """The selector, if it can decide before samples are loaded."""
    kind = selectors.kind(selector)
    if kind.needs != "nothing":
        possible = sorted(name for name, other in selectors.SELECTORS.items() if other.needs == "nothing")
        raise ValueError(
            f"the selector {kind.name!r} looks at the {kind.needs}, for which samples must be loaded: use "
            f"halfway.ForwardBlocker. Before loading there are {possible}"
        )
    return selectors.make(selector)


def checked_source(source: Any) -> Any:
    """A sampler, or a data set that is not empty."""
    if isinstance(source, EpochSampler):
        raise TypeError(
            f"{type(source).__name__} prunes before each epoch itself; pass the data set, or a sampler that does not"
        )
    if isinstance(source, Sampler):
        return source
    if isinstance(source, Sized) and hasattr(source, "__getitem__"):
        if not len(source):
            raise ValueError("the data set is empty")
        return source
    raise TypeError(
        f"the first argument must be a torch.utils.data.Sampler or a map-style data set, got a {type(source).__name__}"
    )


def checked_targets(targets: Any, selector: Selector, source: Any) -> Tensor | None:
    """(N,) on the CPU, for a selector that looks at classes. As many as the data set has samples, if it can be seen."""
    if targets is None:
        if selector.wants_targets == "required":
            raise ValueError(
                f"the selector {selector.name!r} looks at classes: targets=, one for each sample of the data set"
            )
        return None
    found = torch.as_tensor(targets, device="cpu")
    if found.ndim != 1:
        raise ValueError(
            f"targets must hold one class per sample of the data set, shape (N,), got {tuple(found.shape)}"
        )
    if selector.wants_targets == "no":
        return None
    dataset = source
    if isinstance(source, Sampler):  # what others hold need not be the data set; a wrong id is found later
        dataset = getattr(source, _HOLDS.get(type(source), ""), None)
    if isinstance(dataset, Sized) and len(dataset) != len(found):
        raise ValueError(
            f"there are {len(found)} targets and {len(dataset)} samples: pass one for each sample of the data set, in "
            "its order (of a Subset those of its own samples)"
        )
    return found


def targets_of(targets_N: Tensor, ids: Tensor) -> Tensor:
    """(B,) of the samples `ids` (B,)."""
    outside = (ids < 0) | (ids >= len(targets_N))
    if outside.any():
        raise ValueError(
            f"there is the id {int(ids[outside][0])}, but targets= holds the classes of {len(targets_N)} samples: ids "
            "are positions in the data set, and targets has one class for each"
        )
    return targets_N[ids]
