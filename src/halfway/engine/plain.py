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


class Plain(NamedTuple):
    """The arguments of an operation that are no tensors.

    numbers: what it computes with. sizes: whole numbers that say where or how many, which may well follow the batch.
    """

    numbers: tuple[Any, ...]
    sizes: tuple[Any, ...]

    def agrees(self, other: Plain) -> bool:
        return self == other or (self.sizes == other.sizes and self.same_numbers(other))

    def same_numbers(self, other: Plain) -> bool:
        return len(self.numbers) == len(other.numbers) and all(map(same, self.numbers, other.numbers))


def given(traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plain:
    """What an operation is given beside tensors; a tensor that Python has just made counts as a number."""
    if traits.from_host:
        return Plain((_Made(args[0]),), ())
    count = len(args)
    numbers = [args[i] for i in traits.numbers if i < count and not isinstance(args[i], Tensor)]
    if kwargs:
        numbers += [v for v in kwargs.values() if isinstance(v, (int, float, complex))]
    return Plain(tuple(numbers), tuple([args[i] for i in traits.sizes if i < count]))


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
