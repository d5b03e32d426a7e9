"""How the lists and tuples of a batch are read: with one entry per sample, or as parts that each hold all samples.

    [{"boxes": (3, 4)}, {"boxes": (1, 4)}, ...]   one mapping (dataclass, object) per sample, whatever is in it
    ["a.png", "b.png", ...]                       one plain value per sample
    [(3, 50, 70), (3, 64, 64), ...]               one tensor per sample
    [(N, 10), (N,)]                               two parts: what `default_collate` makes of a tuple in a sample

Types decide what a list holds wherever they can; sizes decide only for lists of tensors. Sizes may coincide: N tensors
with N rows each can be read either way (three images of three channels; two samples with two boxes each). Then the rest
of the batch decides, or how the same list was read in earlier batches. If neither does, that is an error: a wrong guess
would pair the wrong targets with the wrong images.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

Verdict = Literal["samples", "parts", "either"]

_PLAIN = (str, bytes, int, float, complex, bool, type(None))


class Readings:
    """How the lists of earlier batches were read, by place in the batch; decides where sizes cannot."""

    def __init__(self) -> None:
        self._known: dict[str, bool] = {}

    def known(self, path: str) -> bool | None:
        """Whether the list at this place held one entry per sample; None if that is not known yet."""
        return self._known.get(path)

    def learn(self, found: Mapping[str, bool]) -> None:
        self._known.update(found)


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of a nested structure, in order."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from leaves(value)
    elif is_dataclass(tree):
        for name in field_names(tree):
            yield from leaves(getattr(tree, name))
    else:
        yield tree


def verdict(sequence: Sequence[Any], size: int) -> Verdict:
    """What types and sizes say about a list, in a batch of `size` samples. Also "samples" for a list of samples of
    another length, which is an error later."""
    if not sequence:
        return "parts"
    if has_records(sequence) or all(map(is_scalar, leaves(sequence))):
        return "samples"
    if len(sequence) != size:
        return "parts"
    arrays = [leaf for leaf in leaves(sequence) if is_sized(leaf)]
    if not arrays or not all(leaf.ndim > 0 and len(leaf) == size for leaf in arrays):
        return "samples"
    return "either" if _alike(sequence) else "parts"


def has_records(sequence: Any) -> bool:
    """Whether this is a list of mappings, dataclasses, named tuples or objects, or of lists of them; entries may be
    missing (None, or an empty list)."""
    if not _is_list(sequence):
        return False
    there = [entry for entry in sequence if entry is not None and not (isinstance(entry, (list, tuple)) and not entry)]
    return bool(there) and all(_is_record(entry) for entry in there)


def _is_record(entry: Any) -> bool:
    if _is_list(entry):
        return has_records(entry)
    return not is_scalar(entry) and not is_sized(entry)


def _alike(sequence: Sequence[Any]) -> bool:
    """Whether the entries may be samples of one kind. Parts (images, labels) often differ in type or axes."""

    def kind(entry: Any) -> Any:
        return (type(entry), entry.dtype, entry.ndim) if is_sized(entry) else _is_list(entry)

    return len({kind(entry) for entry in sequence if entry is not None}) < 2


def direct_length(tree: Any) -> int | None:
    """The length of the first tensor or array outside any list: its first axis is certainly the batch."""
    sizes = (len(part) for part in _outside_lists(tree) if is_sized(part) and part.ndim > 0)
    return next(sizes, None)


def listed_length(tree: Any) -> int | None:
    """The length of the first list of mappings or other records, or of plain values: it has one entry per sample."""
    lists = (part for part in _outside_lists(tree) if _is_list(part) and part)
    return next((len(part) for part in lists if has_records(part) or all(map(is_scalar, leaves(part)))), None)


def counted_length(tree: Any) -> int | None:
    """The length of the first list that is empty or has tensors in it."""
    lists = (part for part in _outside_lists(tree) if _is_list(part))
    return next((len(p) for p in lists if not p or any(isinstance(leaf, Tensor) for leaf in leaves(p))), None)


def _outside_lists(tree: Any) -> Iterator[Any]:
    """The parts of a structure, without looking into lists and tuples. Mappings and other records have one field for
    each thing, so there is only one way to read them."""
    entries: Any = None
    if isinstance(tree, Mapping):
        entries = tree.values()
    elif hasattr(tree, "_fields"):
        entries = tree
    elif is_dataclass(tree):
        entries = [getattr(tree, name) for name in field_names(tree)]
    if entries is None:
        yield tree
        return
    for entry in entries:
        yield from _outside_lists(entry)


def _is_list(tree: Any) -> bool:
    return isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields")


def is_dataclass(obj: Any) -> bool:
    return dataclasses.is_dataclass(obj) and not isinstance(obj, type)


def field_names(obj: Any) -> list[str]:
    """The fields of a dataclass instance that have a value; one that `__init__` leaves out may have none."""
    return [field.name for field in dataclasses.fields(obj) if hasattr(obj, field.name)]


def is_scalar(obj: Any) -> bool:
    """Whether this is one plain value: a number, a string, None."""
    if is_sized(obj):
        return obj.ndim == 0
    numpy = sys.modules.get("numpy")
    return isinstance(obj, _PLAIN) or (numpy is not None and isinstance(obj, numpy.generic))


def is_plain(obj: Any) -> bool:
    """Whether this is a number, a string or None, and not a tensor or array."""
    return not is_sized(obj) and is_scalar(obj)


def is_sized(obj: Any) -> bool:
    """Whether this is a tensor or an array."""
    return isinstance(obj, Tensor) or is_array(obj)


def is_array(obj: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(obj, numpy.ndarray)
