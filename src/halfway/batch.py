"""Cutting whatever a batch is made of down to the retained samples, and sample ids.

A batch is any nesting of tuples, lists, named tuples, mappings and dataclasses. Every tensor in it must have the
batch's length; numbers, strings and None are handed through. A list with one entry per sample (file names,
images of different sizes) is cut like a tensor. Anything else is an error: a tensor that silently kept its
length would pair the wrong targets with the wrong images.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from . import rows

_PLAIN = (str, bytes, int, float, complex, bool, type(None))


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of a nested structure, in order."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from leaves(value)
    elif _is_dataclass(tree):
        for field in dataclasses.fields(tree):
            yield from leaves(getattr(tree, field.name))
    else:
        yield tree


def length(inputs: Any) -> int:
    """The number of samples: the leading size of the first tensor that goes to the model."""
    for leaf in leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            if leaf.shape[0] == 0:
                raise ValueError("the batch is empty; skip it, or set drop_last in the data loader")
            return leaf.shape[0]
    raise ValueError(
        "found no tensor among the model's inputs, so the batch has no length; pass the model's input first "
        "(blocker(x, y)) or by the name it has in forward (blocker(input_ids=...))"
    )


class Batch(NamedTuple):
    """What was passed to the blocker: parts by position, or by name."""

    parts: tuple[Any, ...]
    named: dict[str, Any]

    def validate(self, size: int) -> None:
        """Raise if some part neither has `size` samples nor is plainly not per-sample."""
        self._each(lambda part, path: _walk(part, size, path, lambda leaf: leaf))

    def cut(self, indices: Tensor, size: int) -> Batch:
        """The same batch with only the samples `indices` (S,) of `size`."""
        take = _taking(indices)
        return self._each(lambda part, path: _walk(part, size, path, take))

    def value(self) -> Any:
        """As it is handed back: a dict for names, one part for one, a tuple for several."""
        if self.named:
            return self.named
        return self.parts[0] if len(self.parts) == 1 else self.parts

    def _each(self, apply: Callable[[Any, str], Any]) -> Batch:
        return Batch(
            tuple(apply(part, f"batch[{i}]") for i, part in enumerate(self.parts)),
            {name: apply(part, name) for name, part in self.named.items()},
        )


def _taking(indices: Tensor) -> Callable[[Any], Any]:
    """A function that takes the samples `indices` out of anything with one entry per sample."""
    on_device = {indices.device: indices}
    on_host: list[list[int]] = []

    def host() -> list[int]:
        # Reads the indices back, so only for parts that are not tensors at all.
        if not on_host:
            on_host.append(indices.tolist())
        return on_host[0]

    def take(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if leaf.device not in on_device:
                on_device[leaf.device] = indices.to(leaf.device)
            return rows.take(leaf, on_device[leaf.device])
        if isinstance(leaf, (list, tuple)):
            return type(leaf)([leaf[i] for i in host()])
        return leaf[host()]

    return take


def _walk(tree: Any, size: int, path: str, per_sample: Callable[[Any], Any]) -> Any:
    """Rebuild `tree` with `per_sample` applied to everything that has one entry per sample."""
    if isinstance(tree, Tensor) and tree.ndim > 0:
        if tree.layout is not torch.strided or tree.is_nested:
            raise TypeError(f"{path} is not a dense tensor (layout {tree.layout}); make it dense or pad it first")
        _check_length(tree.shape[0], size, path)
        return per_sample(tree)
    if _is_scalar(tree):
        return tree
    if isinstance(tree, Mapping):
        entries = {k: _walk(v, size, f"{path}[{k!r}]", per_sample) for k, v in tree.items()}
        if not isinstance(tree, MutableMapping):
            return type(tree)(entries)  # type: ignore[call-arg]
        rebuilt = copy.copy(tree)
        rebuilt.update(entries)
        return rebuilt
    if isinstance(tree, (list, tuple)):
        if not hasattr(tree, "_fields") and _one_entry_per_sample(tree, size, path):
            return per_sample(tree)
        parts = [_walk(v, size, f"{path}[{i}]", per_sample) for i, v in enumerate(tree)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if _is_dataclass(tree):
        names = [f.name for f in dataclasses.fields(tree)]
        parts_by_name = {n: _walk(getattr(tree, n), size, f"{path}.{n}", per_sample) for n in names}
        return dataclasses.replace(tree, **parts_by_name)
    if _is_array(tree):
        _check_length(len(tree), size, path)
        return per_sample(tree)
    raise TypeError(
        f"{path} is a {type(tree).__name__}, which halfway cannot cut to the retained samples; pass tensors, "
        "arrays, lists with one entry per sample, or nestings of them, and leave other objects out of the call"
    )


def _one_entry_per_sample(sequence: Sequence[Any], size: int, path: str) -> bool:
    """Whether a list holds one entry per sample rather than several tensors that each hold all samples."""
    if not sequence:
        return False
    if all(_is_scalar(leaf) for leaf in leaves(sequence)):
        _check_length(len(sequence), size, path)
        return True
    batched = all(
        leaf.ndim > 0 and leaf.shape[0] == size
        for leaf in leaves(sequence)
        if isinstance(leaf, Tensor) or _is_array(leaf)
    )
    return len(sequence) == size and not batched


def _check_length(found: int, size: int, path: str) -> None:
    if found != size:
        raise ValueError(
            f"{path} has {found} entries along its first axis, but the model's input has {size} samples; "
            "everything handed to the blocker must have the batch first (pass what does not to the model only)"
        )


def _is_dataclass(obj: Any) -> bool:
    return dataclasses.is_dataclass(obj) and not isinstance(obj, type)


def _is_scalar(obj: Any) -> bool:
    if isinstance(obj, Tensor) or _is_array(obj):
        return obj.ndim == 0
    numpy = sys.modules.get("numpy")
    return isinstance(obj, _PLAIN) or (numpy is not None and isinstance(obj, numpy.generic))


def _is_array(obj: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(obj, numpy.ndarray)


class WithIds(Dataset):
    """A map-style data set that also yields each sample's index.

    A tuple gets the index as one more entry, a mapping gets the entry "ids", anything else becomes (item, index).

        for x, y, ids in DataLoader(halfway.WithIds(dataset), batch_size=128):
            x, y = blocker(x, y, ids=ids)
    """

    def __init__(self, dataset: Dataset) -> None:
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise TypeError("WithIds needs a map-style data set, with __getitem__ and __len__")
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        if isinstance(item, Mapping):
            if "ids" in item:
                raise ValueError("the data set already yields an entry 'ids'; use that one")
            return {**item, "ids": index}
        if isinstance(item, tuple) and not hasattr(item, "_fields"):
            return (*item, index)
        return (item, index)
