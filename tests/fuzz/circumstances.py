"""How a random program is trained: precision, memory layout, selector, batches; and the random generators meanwhile."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import halfway
from halfway.selectors import Ranking
from tests.fuzz.programs import CHANNELS, Program
from tests.fuzz.programs.draws import Draw

# In float64, relative to the largest gradient of the program: rounding stays below 1e-10, an error does not. In half
# precision a program may amplify rounding, so there the same program in float64 says how much is normal.
TOLERANCE = 1e-8
TOLERANCE_HALF = 0.05

Gradients = dict[str, Tensor]


class Output(Ranking):
    """Ranks by what the program returns."""

    name = "output"
    needs = "outputs"

    def importance(self, candidates):
        return candidates.outputs


class Calm(Ranking):
    """Retains the samples with the smallest features: the extremes of a batch are never among them."""

    name = "calm"
    needs = "features"

    def importance(self, candidates):
        return -candidates.features.flatten(1).norm(dim=1)


@dataclass(frozen=True)
class Circumstances:
    """How a program is trained.

    dtype: of everything, or, with autocast, of what autocast chooses.
    accumulate: batches per optimizer step.
    whole: blocked at its output, not at the cut.
    calm: extremes are pruned; else what is rare is retained.
    uneven: some samples are larger than others.
    ragged: one batch is shorter.
    inserted: after the first step the program gets another one.
    """

    dtype: torch.dtype = torch.float64
    autocast: bool = False
    channels_last: bool = False
    accumulate: int = 1
    whole: bool = False
    calm: bool = False
    uneven: bool = False
    ragged: bool = False
    inserted: bool = False

    @classmethod
    def draw(cls, rng: random.Random) -> Circumstances:
        half = rng.choice([torch.bfloat16, torch.float16]) if rng.random() < 0.2 else None
        return cls(
            dtype=half or torch.float64,
            autocast=half is not None and rng.random() < 0.6,
            channels_last=rng.random() < 0.3,
            accumulate=rng.choice([1, 1, 1, 1, 1, 2]),
            whole=rng.random() < 0.2,
            calm=rng.random() < 0.3,
            uneven=rng.random() < 0.5,
            ragged=rng.random() < 0.1,
            inserted=rng.random() < 0.05,
        )

    @property
    def half(self) -> bool:
        return self.dtype != torch.float64

    @property
    def tolerance(self) -> float:
        return TOLERANCE_HALF if self.half else TOLERANCE

    def exact(self) -> Circumstances:
        """The same in float64."""
        return replace(self, dtype=torch.float64, autocast=False)

    def program(self, rng: random.Random, **settings: Any) -> Program:
        program = Program(rng, self.whole, smooth=self.half, **settings).train()
        if self.half:
            program = program.to(torch.float32 if self.autocast else self.dtype)
        return program.to(memory_format=torch.channels_last) if self.channels_last else program

    def blocker(self, program: nn.Module, ratio: float, rng: random.Random) -> halfway.ForwardBlocker:
        if self.whole:
            return halfway.ForwardBlocker(program, None, ratio, selector=Output())
        selector = Calm() if self.calm else halfway.Density(num_centroids=rng.choice([1, 3]))
        return halfway.ForwardBlocker(program, "cut", ratio, selector=selector)

    def batch(self, n: int, side: int) -> Tensor:
        x = torch.randn(n, CHANNELS, side, side, dtype=torch.float64)
        if self.uneven:
            x = x * (0.3 + 2 * torch.rand(n, 1, 1, 1, dtype=torch.float64))
        x = x.to(torch.float32 if self.autocast else self.dtype)
        return x.to(memory_format=torch.channels_last) if self.channels_last else x

    def forward(self, called: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype if self.autocast else torch.bfloat16, enabled=self.autocast):
            return called(x)

    def gradients(self, called: nn.Module, x: Tensor, program: nn.Module | None = None) -> Gradients:
        """Of the model that is called, which may be a wrapper of the program."""
        program = program or called
        program.zero_grad()
        self.forward(called, x).double().square().mean().backward()
        return {n: p.grad.clone() for n, p in program.named_parameters() if p.grad is not None}


class Generators:
    """The state of all random generators: the global ones, and those that steps hold."""

    def __init__(self, program: Program) -> None:
        self.torch = torch.get_rng_state()
        self.host = random.getstate(), np.random.get_state()  # noqa: NPY002  (what models use)
        self.own = [g.get_state() for g in own_generators(program)]

    def restore(self, program: Program) -> None:
        torch.set_rng_state(self.torch)
        random.setstate(self.host[0])
        np.random.set_state(self.host[1])  # noqa: NPY002
        for generator, state in zip(own_generators(program), self.own, strict=True):
            generator.set_state(state)

    def difference(self, other: Generators) -> str:
        if not torch.equal(self.torch, other.torch):
            return "torch's generator has another state"
        if self.host[0] != other.host[0]:
            return "Python's generator has another state"
        mine, theirs = self.host[1], other.host[1]
        same = mine[2:] == theirs[2:] and np.array_equal(mine[1], theirs[1])
        return "" if same else "NumPy's generator has another state"


def own_generators(program: Program) -> list[torch.Generator]:
    return [s.generator for s in program.steps() if isinstance(s, Draw) and s.generator is not None]
