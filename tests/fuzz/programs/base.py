"""The notes a first pass takes for a second one, and what all steps have in common."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

CHANNELS = 4


@dataclass
class Note:
    """Side information of a first pass over all `size` samples: what a second pass over some of them is to use.

    rows: the retained samples; None in the first pass.
    mixed: whether what flows through the program, by now, depends on other samples of the batch.
    """

    size: int
    rows: Tensor | None = None
    mixed: bool = False
    kept: dict[int, list[Any]] = field(default_factory=dict)

    def begin(self, rows: Tensor) -> None:
        """The first pass is over; the second is to be on these rows."""
        self.rows, self.mixed = rows, False

    def cut(self, value: Tensor, axis: int = 0, before: int = 1) -> Tensor:
        """The retained samples' part of a value whose axis holds (before, samples, whatever is left)."""
        after = value.shape[axis] // (before * self.size)
        apart = value.unflatten(axis, (before, self.size, after))
        return apart.index_select(axis + 1, self.rows).flatten(axis, axis + 2)


class Step(nn.Module):
    """One step of a program.

    Attributes:
        KINDS: what it can be; `kind` says which it is.
        number: unlike that of every other step of the program; copies of the program have the same.
        note: None in a plain run.
        rough: a difference in the last digit may change its gradients a lot. Not for half precision, where there
            always is one.
    """

    KINDS: tuple[str, ...] = ("",)
    number = 0
    note: Note | None = None
    rough = False

    def __init__(self, rng: random.Random, kind: str | None = None) -> None:
        super().__init__()
        self.kind = rng.choice(self.KINDS) if kind is None else kind

    @property
    def replaying(self) -> bool:
        return self.note is not None and self.note.rows is not None

    def remember(self, value: Any) -> None:
        if self.note is not None and self.note.rows is None:
            self.note.kept.setdefault(self.number, []).append(value)

    def recall(self) -> Any:
        return self.note.kept[self.number].pop(0)

    def mixes(self) -> None:
        """From here on everything depends on other samples of the batch."""
        if self.note is not None:
            self.note.mixed = True

    def drawn(self, draw: Callable[[], Tensor], axis: int | None = 0, before: int = 1) -> Tensor:
        """What `draw` gives; in a replay what it gave for all samples, cut to the retained ones.

        axis, before: where the samples lie in it, see `Note.cut`; None: nowhere, it is the same for all.
        """
        if self.replaying:
            kept = self.recall()
            return kept if axis is None else self.note.cut(kept, axis, before)
        value = draw()
        self.remember(value.clone())
        return value

    def own_dtype(self, x: Tensor) -> torch.dtype:
        """Of parameters and buffers made on the way: under autocast it is not that of x."""
        return next((p.dtype for p in self.parameters()), x.dtype)

    def settings(self) -> str:
        """The step in a few words."""
        shown = {k: v for k, v in vars(self).items() if k[0] != "_" and type(v) in (str, bool, int, float)}
        hidden = ("training", "number", "kind", "calls", "rough")
        rest = ", ".join(f"{k}={v}" for k, v in shown.items() if k not in hidden and v not in ("", False))
        return f"{type(self).__name__}({', '.join(s for s in (self.kind, rest) if s)})"
