"""Cutting a batch, whatever it is made of, down to the retained samples; and sample ids.

A batch is any nesting of tuples, lists, named tuples, mappings and dataclasses. Every tensor in it must have the
batch's length; numbers, strings and None pass through unchanged. A list with one entry per sample (file names, targets,
images of different sizes) is cut like a tensor; `reading.py` decides which lists these are. Anything else is an error:
a tensor that silently kept its length would pair the wrong targets with the wrong images.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from . import reading, rows
from .reading import Readings, leaves

__all__ = ["Batch", "WithIds", "leaves", "length"]


def length(inputs: Any) -> int:
    """The number of samples: the leading size of the first tensor that goes to the model."""
    for leaf in leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            return _not_empty(leaf.shape[0])
    raise ValueError(
        "found no tensor among the model's inputs, so the batch has no length; pass the model's input first "
        "(blocker(x, y)) or by the name it has in forward (blocker(input_ids=...))"
    )


def _not_empty(size: int) -> int:
    if size == 0:
        raise ValueError("the batch is empty; skip it, or set drop_last in the data loader")
    return size


class Batch(NamedTuple):
    """What was passed to the blocker: parts by position, or by name.

    first: what the first part is to the model. "part": one argument, like all others. "arguments": a tuple or list
        whose entries are the model's arguments. "samples": one argument, a list with one entry per sample.
    readings: how lists were read in earlier batches; None: ambiguous lists are taken to hold parts.
    """

    parts: tuple[Any, ...]
    named: dict[str, Any]
    first: Literal["part", "arguments", "samples"] = "part"
    readings: Readings | None = None

    def length(self, arguments: Iterable[Any]) -> int:
        """The number of samples in a batch that goes to the model as `arguments`: the leading size of their first
        tensor. If all their tensors are in lists, the rest of the batch decides, or else the entries are counted."""
        if self.first == "samples":
            return _not_empty(len(self.parts[0]))
        arguments = list(arguments)
        if arguments and type(arguments[0]) is Tensor and arguments[0].ndim:
            return _not_empty(arguments[0].shape[0])
        whole = [*self.parts, *self.named.values()]
        for tell, where in (
            (reading.direct_length, (a for a in arguments if not reading.is_array(a))),
            (reading.direct_length, whole),
            (reading.listed_length, whole),
        ):
            found = next((n for n in map(tell, where) if n is not None), None)
            if found is not None and any(isinstance(leaf, Tensor) for leaf in leaves(arguments)):
                return _not_empty(found)
        counted = next((n for n in map(reading.counted_length, arguments) if n is not None), None)
        return length(arguments) if counted is None else _not_empty(counted)

    def validate(self, size: int) -> None:
        """Raise if a part that should be per-sample does not have `size` samples."""
        reader = _Reader(self, size)
        try:
            self._each(lambda part, path: _walk(part, reader, path, lambda leaf: leaf))
        except ValueError as error:
            raise ValueError(f"{error}{self._doubt(size)}") from None
        if self.readings is not None:
            self.readings.learn({**reader.clear, "first": self.first == "samples"})

    def cut(self, indices: Tensor, size: int) -> Batch:
        """The same batch with only the samples `indices` (S,) of `size`."""
        take, reader = _taking(indices), _Reader(self, size)
        return self._each(lambda part, path: _walk(part, reader, path, take))

    def value(self) -> Any:
        """What the blocker returns: a dict for named parts, the part itself if there is one, else a tuple."""
        if self.named:
            return self.named
        return self.parts[0] if len(self.parts) == 1 else self.parts

    def _each(self, apply: Callable[[Any, str], Any]) -> Batch:
        def part(i: int, value: Any) -> Any:
            if i == 0 and self.first == "arguments":
                return _rebuilt(value, [apply(v, f"batch[0][{j}]") for j, v in enumerate(value)])
            return apply(value, f"batch[{i}]")

        return self._replace(
            parts=tuple(part(i, value) for i, value in enumerate(self.parts)),
            named={name: apply(value, name) for name, value in self.named.items()},
        )

    def _doubt(self, size: int) -> str:
        """What to add to an error message if the first part may not be what it was taken for."""
        if self.first != "arguments" or hasattr(self.parts[0], "_fields"):
            return ""
        kind = "tuple" if isinstance(self.parts[0], tuple) else "list"
        return (
            f". (The {kind} in first place goes to the model as its arguments, one by one, and the first of them has "
            f"{size} rows. If it holds one entry per sample, say that it is one argument: inputs=0)"
        )


class _Reader:
    """Decides how the lists of one batch are read.

    Attributes:
        clear: for each unambiguous list, by its place in the batch, whether it has one entry per sample.
    """

    def __init__(self, whole: Batch, size: int) -> None:
        self.size = size
        self.clear: dict[str, bool] = {}
        self._whole = whole

    def one_entry_per_sample(self, sequence: Any, path: str) -> bool:
        """Whether a list holds one entry per sample rather than several parts that each hold all samples."""
        if self._whole.first == "samples" and path == "batch[0]":
            found: str = "samples"
        else:
            found = reading.verdict(sequence, self.size)
        if found == "either":
            return self._undecided(sequence, path)
        if found == "samples" and len(sequence) != self.size:
            raise ValueError(
                f"{path} has {len(sequence)} entries, but the model's input has {self.size} samples, and a list of "
                "plain values, mappings or other objects has one for each. Pass parts that hold all samples by "
                "themselves (blocker(x, a, b)) or in a dict, and what has nothing to do with samples to the model only"
            )
        self.clear[path] = found == "samples"
        return self.clear[path]

    def _undecided(self, sequence: Any, path: str) -> bool:
        whole, readings = self._whole, self._whole.readings
        if readings is not None and readings.known(path) is not None:
            return bool(readings.known(path))
        if readings is None:
            return False
        parts = [*whole.parts, *whole.named.values()]
        if whole.first == "samples" or all(reading.direct_length(part) is None for part in parts):
            return True
        if any(reading.has_records(part) and len(part) == self.size for part in parts):
            return True
        N = self.size
        raise ValueError(
            f"{path} is a {type(sequence).__name__} of {N} tensors with {N} rows each, in a batch of {N} samples: one "
            f"entry per sample, or {N} parts that hold all of them? Pass parts by themselves (blocker(x, a, b)) or in "
            "a dict, and what belongs to a sample in a dict per sample ([{'boxes': ...}, ...]). Or begin with a batch "
            "of another size: a list is read as it was before"
        )


def _taking(indices: Tensor) -> Callable[[Any], Any]:
    """A function that takes the samples `indices` out of anything with one entry per sample."""
    on_device = {indices.device: indices}
    on_host: list[list[int]] = []

    def host() -> list[int]:
        # Reads the indices back to the host, so only used for parts that are not tensors.
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


def _walk(tree: Any, reader: _Reader, path: str, per_sample: Callable[[Any], Any]) -> Any:
    """Rebuild `tree` with `per_sample` applied to everything that has one entry per sample."""
    if isinstance(tree, Tensor) and tree.ndim > 0:
        if tree.layout is not torch.strided or tree.is_nested:
            raise TypeError(f"{path} is not a dense tensor (layout {tree.layout}); make it dense or pad it first")
        _check_rows(tree.shape[0], reader.size, path)
        return per_sample(tree)
    if reading.is_scalar(tree):
        return tree
    if isinstance(tree, Mapping):
        entries = {k: _walk(v, reader, f"{path}[{k!r}]", per_sample) for k, v in tree.items()}
        if not isinstance(tree, MutableMapping):
            return type(tree)(entries)  # type: ignore[call-arg]
        rebuilt = copy.copy(tree)
        rebuilt.update(entries)
        return rebuilt
    if isinstance(tree, (list, tuple)):
        if not hasattr(tree, "_fields") and reader.one_entry_per_sample(tree, path):
            return per_sample(tree)
        return _rebuilt(tree, [_walk(v, reader, f"{path}[{i}]", per_sample) for i, v in enumerate(tree)])
    if reading.is_dataclass(tree):
        return _rebuilt_dataclass(
            tree, {n: _walk(getattr(tree, n), reader, f"{path}.{n}", per_sample) for n in reading.field_names(tree)}
        )
    if reading.is_array(tree):
        _check_rows(len(tree), reader.size, path)
        return per_sample(tree)
    raise TypeError(
        f"{path} is a {type(tree).__name__}, which halfway cannot cut to the retained samples; pass tensors, "
        "arrays, lists with one entry per sample, or nestings of them, and leave other objects out of the call"
    )


def _rebuilt(sequence: Any, entries: list[Any]) -> Any:
    """A tuple, list or named tuple like `sequence` with other entries."""
    return type(sequence)(*entries) if hasattr(sequence, "_fields") else type(sequence)(entries)


def _rebuilt_dataclass(old: Any, values: dict[str, Any]) -> Any:
    """A dataclass like `old` with other values.

    It is constructed again, so that what its `__post_init__` works out (a length, say) fits the retained samples.
    Fields that `__init__` does not take are set afterwards, except plain values that `__post_init__` has set.
    """
    taken = {field.name for field in dataclasses.fields(old) if field.init}
    try:
        new = dataclasses.replace(old, **{name: value for name, value in values.items() if name in taken})
    except (TypeError, ValueError):
        # It has a hand-written `__init__`, or one that takes more than the fields.
        new, taken = copy.copy(old), set()
    worked_out = bool(taken) and hasattr(old, "__post_init__")
    for name in values.keys() - taken:
        if not (worked_out and reading.is_scalar(values[name]) and hasattr(new, name)):
            object.__setattr__(new, name, values[name])
    return new


def _check_rows(found: int, size: int, path: str) -> None:
    if found != size:
        raise ValueError(
            f"{path} has {found} entries along its first axis, but the model's input has {size} samples; everything "
            "handed to the blocker must have the batch first (pass what does not to the model only)"
        )


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
