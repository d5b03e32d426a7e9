"""What operations are given beside tensors: numbers, sizes, axes.

`x * 0.5` is one operation for a dispatch mode, and `x / len(x)` another call of it. Values that Python computes with
can follow the number of samples without any tensor showing it. So what each operation is given is noted in the probe
and compared in every pass of the step: it may be anything, and change from step to step, but not with the samples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ops import Traits

# By position, None for tensors; and those given by name.
Given = tuple[Any, Any]

NOTHING: Given = ((), ())
_TYPES = frozenset({int, float, bool, complex, list, tuple})


def given(traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    """What an operation is given beside tensors; a tensor that Python has just made counts as a number."""
    if traits.from_host:
        return _Made(args[0]), ()
    if not traits.plain and not kwargs:
        return NOTHING
    found = [a if type(a) in _TYPES else None for a in args]
    for i in traits.tensor_lists:
        if i < len(found):
            found[i] = None
    return found, [v for v in kwargs.values() if type(v) in _TYPES] if kwargs else ()


class Plain(NamedTuple):
    """The same, told apart.

    numbers: what an operation computes with. sizes: what says where or how many, and may well follow the batch.
    """

    numbers: list[Any]
    sizes: list[Any]

    @classmethod
    def of(cls, traits: Traits, found: Given) -> Plain:
        by_position, by_name = found
        if isinstance(by_position, _Made):
            return cls([by_position], [])
        numbers = [v for i, v in enumerate(by_position) if i in traits.numbers]
        return cls([*numbers, *by_name], [v for i, v in enumerate(by_position) if i not in traits.numbers])

    def agrees(self, other: Plain) -> bool:
        return self.sizes == other.sizes and self.same_numbers(other)

    def same_numbers(self, other: Plain) -> bool:
        return len(self.numbers) == len(other.numbers) and all(map(same, self.numbers, other.numbers))


class _Made:
    """A tensor as `torch.tensor(0.5)` makes it, compared like a number."""

    def __init__(self, t: Tensor) -> None:
        self._t = t.detach().clone()

    def __eq__(self, other: object) -> bool:
        # One of another shape has an entry for each sample: `axis` follows those.
        return isinstance(other, _Made) and (self._t.shape != other._t.shape or same_values(self._t, other._t))

    __hash__ = None  # type: ignore[assignment]


def same(a: Any, b: Any) -> bool:
    """Equal; NaN is itself."""
    return a == b or (a != a and b != b)


def same_values(a: Tensor, b: Tensor) -> bool:
    """Equal everywhere; NaN is itself. Waits for the device."""
    return a.is_meta or bool(torch.all((a == b) | ((a != a) & (b != b))))
