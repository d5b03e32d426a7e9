"""Passing a trainer's batch through the blocker: which fields go to the model, and which one holds the ids."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..batches import rows
from ..blocker.blocker import ForwardBlocker

# Parameters of the blocker's own call; fields of a batch with these names would be mistaken for them.
_RESERVED = ("ids", "inputs")


@dataclass(frozen=True)
class Fields:
    """Where things are in a batch: keys of a mapping, positions in a tuple or list.

    ids: the field with the ids of the samples. None: the entry "ids" of a mapping, if any (`halfway.WithIds` makes it).
    inputs: the fields that go to the model, as for `ForwardBlocker.__call__`. None: the first of a tuple or list; of a
        mapping those that the model's `forward` has parameters for.
    """

    ids: int | str | None = None
    inputs: Any = None

    def retain(self, blocker: ForwardBlocker, batch: Any) -> Any:
        """The retained part of a batch: the same fields, in a batch of the same type."""
        if isinstance(batch, Tensor):
            return blocker(batch, inputs=self.inputs)
        if isinstance(batch, Mapping):
            return self._mapping(blocker, batch)
        if isinstance(batch, (tuple, list)) and batch:
            ids = None if self.ids is None else self._field(batch, self.ids)
            retained = blocker(*batch, ids=ids, inputs=self.inputs)
            parts = retained if len(batch) > 1 else (retained,)
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
        raise TypeError(
            f"the batch is a {type(batch).__name__}, but halfway can cut a tensor, a tuple, a list or a mapping; let "
            "the data loader's collate_fn give one of these"
        )

    def _mapping(self, blocker: ForwardBlocker, batch: Mapping[str, Any]) -> Any:
        named = dict(batch)
        key = self.ids if self.ids is not None else "ids" if "ids" in named else None
        ids = None
        if key is not None:
            ids = self._field(batch, key)
            del named[key]  # type: ignore[arg-type]
        taken = [name for name in _RESERVED if name in named]
        if taken:
            raise ValueError(f"the batch's field {taken[0]!r} has a name that halfway uses itself; give it another one")
        retained = blocker(**named, ids=ids, inputs=self.inputs)
        if ids is not None:
            retained = {**retained, key: ids if blocker.last is None else _taken(ids, blocker.last.indices)}
        if not isinstance(batch, MutableMapping):
            return type(batch)(retained)  # type: ignore[call-arg]
        rebuilt = copy.copy(batch)
        rebuilt.update(retained)
        return rebuilt

    def _field(self, batch: Mapping[Any, Any] | Sequence[Any], where: int | str) -> Tensor:
        try:
            found = batch[where]  # type: ignore[index]
            return found if isinstance(found, Tensor) else torch.as_tensor(found, device="cpu")
        except (KeyError, IndexError, TypeError):
            there = list(batch) if isinstance(batch, Mapping) else f"{len(batch)} fields"
            raise ValueError(
                f"the ids should be the batch's field {where!r}, but it has {there}; halfway.WithIds(dataset) adds "
                "them as the last of a tuple, or as 'ids' to a mapping"
            ) from None


def _taken(ids: Tensor, indices: Tensor) -> Tensor:
    return rows.take(ids, indices.to(ids.device))
