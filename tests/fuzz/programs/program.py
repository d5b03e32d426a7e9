"""Put random steps together to a program."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from . import draws, folds, mixing, ordinary, reads, state
from .base import CHANNELS, Note, Step

_ORDINARY: list[type[Step]] = [ordinary.Conv, ordinary.Conv, ordinary.Pointwise, ordinary.Pointwise, ordinary.Attention]
_ORDINARY += [ordinary.InPlace, ordinary.InPlace, ordinary.Cheap, ordinary.Cheap, ordinary.Norm]
# How often a step is of which family; the classes of a family are equally likely.
FAMILIES: dict[str, tuple[float, list[type[Step]]]] = {
    "ordinary": (0.66, _ORDINARY),
    "draws": (0.11, [draws.Dropout, draws.Dropout, draws.Draw, draws.Draw, draws.DrawFrom, draws.RandomSlope]),
    "mixing": (0.06, [mixing.Mixing, mixing.Mixing, mixing.Mixing, mixing.Dormant, mixing.Dormant]),
    "places": (0.02, [mixing.Reorder, mixing.Reorder, mixing.Length]),
    "folds": (0.05, [folds.Folded]),
    "reads": (0.03, [reads.Read, reads.Read, draws.LayerDrop]),
    "state": (0.07, [state.Counts, state.Average, state.Momentum, state.Lazy, state.Aside]),
}


def make_step(rng: random.Random, smooth: bool = False, families: tuple[str, ...] = tuple(FAMILIES)) -> Step:
    """A random step of these families. smooth: not a rough one, see `Step`."""
    weights = [FAMILIES[f][0] for f in families]
    while True:
        classes = FAMILIES[rng.choices(families, weights)[0]][1]
        step = rng.choice(classes)(rng)
        if not (smooth and step.rough):
            return step


def every_kind() -> Iterator[tuple[type[Step], str]]:
    """Each class of steps with each kind it has."""
    for step in dict.fromkeys(c for _, classes in FAMILIES.values() for c in classes):
        for kind in dict.fromkeys(step.KINDS):
            yield step, kind


class DropElements(nn.Module):
    """Dropout whose draw does not depend on the memory layout of its input (that of nn.Dropout does)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape) > 0.2)


class Program(nn.Module):
    """A random program: a shallow part, the cut, a deep part, a skip connection across the cut.

    Args:
        steps: those of the shallow part; random ones by default.
        whole: it is to be blocked at its output, so the deep part is like the shallow one: made of steps that note.
        smooth: without rough steps.
        families: what random steps are taken from.
    """

    def __init__(
        self,
        rng: random.Random,
        whole: bool = False,
        smooth: bool = False,
        families: tuple[str, ...] = tuple(FAMILIES),
        steps: list[Step] | None = None,
    ) -> None:
        super().__init__()
        make = partial(make_step, rng, smooth, families)
        if steps is None:
            count = rng.choice([1, 2, 3, 3, 4, 5])
            steps = [ordinary.Residual(rng, make) if rng.random() < 0.12 else make() for _ in range(count)]
        self.shallow = nn.ModuleList(steps)
        self.cut = nn.Identity()
        self.deep = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), DropElements(), nn.BatchNorm2d(CHANNELS))
        if whole:
            self.deep = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), make())
        self.skip = rng.choice([None, *range(len(self.shallow))])
        # As transformers collects hidden states: by hooks on the layers, which the first forward installs.
        self.captures = "state" in families and rng.random() < 0.03
        self.captured: list[Tensor] = []
        self.installed = False
        self._number()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.captures:
            self._install()
        out, skipped = x * 1.0, 0.0
        for i, step in enumerate(self.shallow):
            out = step(out)
            if i == self.skip:
                skipped = out.clone()
        # Summed in float64: behind a BatchNorm the sum is about zero, and in half precision nothing but rounding.
        out = (self.deep(self.cut(out * 1.0)) + skipped).flatten(1).double().sum(1)
        if self.captures:
            out = out + 0.5 * self.captured[1 % len(self.captured)] + 0.1 * len(self.captured)
            self.captured = []
        for step in self.steps():
            if isinstance(step, state.Aside):
                out, step.loss = out + 0.1 * step.loss, None
        return out

    def _install(self) -> None:
        self.captured = []
        if not self.installed:
            self.installed = True
            for layer in [*self.shallow, self.deep[0]]:
                layer.register_forward_hook(self._capture)

    def _capture(self, module: nn.Module, args: object, output: Tensor) -> None:
        self.captured.append(output.flatten(1).double().sum(1))

    def steps(self) -> list[Step]:
        return [m for m in self.modules() if isinstance(m, Step)]

    def insert(self, index: int, step: Step) -> None:
        """Put another step into the shallow part."""
        self.shallow.insert(index, step.to(self.deep[0].weight.dtype))
        self._number()

    def _number(self) -> None:
        for i, step in enumerate(self.steps()):
            step.number = i

    def describe(self) -> str:
        """The steps with their settings, in a line."""
        words = [step.settings() for step in self.steps()]
        return " ".join([*words, *(["captures"] if self.captures else []), f"skip={self.skip}"])

    def kinds(self) -> set[str]:
        """The classes of steps it has, with their kinds."""
        kinds = {f"{type(s).__name__}({s.kind})" if s.kind else type(s).__name__ for s in self.steps()}
        return kinds | ({"captures"} if self.captures else set())

    def set_note(self, note: Note | None) -> None:
        for step in self.steps():
            step.note = note
