"""Train a random program with a blocker, and compare every step with what it should be.

`check(seed)` makes everything from one number and returns what happened; `python -m tests.fuzz.report` runs many. What
a replayed step should be is documented (`programs`); any other one is plain training on the retained samples.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import halfway
from tests.fuzz.circumstances import TOLERANCE_HALF, Circumstances, Generators, Gradients, own_generators
from tests.fuzz.left_behind import differences
from tests.fuzz.programs import CHANNELS, Note, Program, Step, make_step
from tests.fuzz.programs.draws import Draw, DrawFrom, Dropout, RandomSlope
from tests.fuzz.programs.ordinary import Norm


class Wrong(AssertionError):
    """A step was not what it should be."""


def as_documented(
    how: Circumstances, program: Program, x: Tensor, rows: Tensor, part: Tensor, before: Generators, after: Generators
) -> tuple[Gradients, list[list[Tensor]]]:
    """Train the program as a replay is documented: a pass over all samples takes notes, the retained ones use them.

    Returns the gradients, and the states that the steps' own generators may be in: a draw for all samples has moved
    them, or one for the retained ones.
    """
    first, plain = copy.deepcopy(program), copy.deepcopy(program)
    note = Note(len(x))
    first.set_note(note)
    before.restore(first)
    with torch.no_grad():
        how.forward(first, x)
    states = [[g.get_state() for g in own_generators(first)]]
    if states[0]:
        before.restore(plain)
        with torch.no_grad():
            how.forward(plain, part)
        states.append([g.get_state() for g in own_generators(plain)])
    note.begin(rows)
    program.set_note(note)
    after.restore(program)
    gradients = how.gradients(program, part)
    program.set_note(None)
    return gradients, states


@dataclass
class Outcome:
    """What came of a program.

    verdict: "right", "wrong", or "crash". message: what was wrong, in a line. kinds: of its steps.
    """

    seed: int
    described: str = ""
    kinds: set[str] = field(default_factory=set)
    verdict: str = "right"
    message: str = ""
    replayed: int = 0
    recomputed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        return f"seed {self.seed}: {self.verdict}: {self.message} | {self.described}"


@dataclass
class Made:
    """A program with its batch lengths, side and prune ratio."""

    program: Program
    n: int
    side: int
    ratio: float
    steps: int = 3


def make(rng: random.Random, how: Circumstances, **settings: Any) -> Made | None:
    """A program; None if autograd needs a value that the program overwrites, or its gradients are not finite."""
    torch.manual_seed(rng.randint(0, 2**31))
    program = how.program(rng, **settings)
    # Behind a random draw an operation may be trusted only when 16 rows have been compared.
    draws = any(isinstance(s, (Draw, DrawFrom, Dropout, RandomSlope)) for s in program.steps())
    n = rng.choice([5, 32, 41] if draws else [2, 3, CHANNELS, 5, 7, 12])
    if how.half:
        n = rng.choice([8, 40])
    side = rng.choice([2, 3])
    ratio = rng.choice([0.3, 0.4, 0.5, 0.7])
    # PyTorch's own BatchNorm backward is wrong on the CPU for a single sample when only one of input and gradient has
    # strides like (C, 1, W C, C) (seen in 2.8 and 2.15, without halfway), so these programs retain at least two.
    least = 1 if not any(isinstance(s, Norm) for s in program.steps()) else 3 if how.ragged else 2
    while halfway.functional.retained_count(n, ratio) < least:
        n += 1
    try:
        gradients = how.gradients(copy.deepcopy(program), how.batch(n, side))
    except RuntimeError:
        return None
    if not all(g.isfinite().all() for g in gradients.values()):
        return None
    return Made(program, n, side, ratio)


def prepare(
    seed: int, how: Circumstances | None = None, **settings: Any
) -> tuple[random.Random, Circumstances, Made, Outcome]:
    """The program of this seed, how it will be trained, and an outcome that only describes it."""
    rng = random.Random(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    how = how or Circumstances.draw(rng)
    made = next(m for m in (make(rng, how, **settings) for _ in range(100)) if m is not None)
    shown = ", ".join(f"{k}={v}" for k, v in vars(how).items() if v != getattr(Circumstances, k))
    described = f"{made.program.describe()} n={made.n} side={made.side} ratio={made.ratio} {shown}"
    return rng, how, made, Outcome(seed, described, made.program.kinds())


def check(seed: int, how: Circumstances | None = None, **settings: Any) -> Outcome:
    """Train the program of this seed for a few steps, and compare each. Raises only if the reference does."""
    rng, how, made, outcome = prepare(seed, how, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        blocker = how.blocker(made.program, made.ratio, rng)
        trained = _Training(how, made, blocker, rng)
        try:
            for step in range(made.steps * how.accumulate):
                trained.step(step)
            blocker.stats  # noqa: B018  (raises what went wrong)
        except Wrong as wrong:
            outcome.verdict, outcome.message = "wrong", str(wrong)
        except Crash as crash:
            outcome.verdict, outcome.message = "crash", str(crash)
        except (halfway.ReplayError, FloatingPointError) as error:
            # In half precision a program may leave the range of its numbers, and is told so.
            if not (how.half and isinstance(error, FloatingPointError)):
                outcome.verdict, outcome.message = "crash", _one_line(error)
    outcome.replayed = blocker._counters.replayed_steps
    outcome.reasons = Counter(blocker._counters.recomputed)
    outcome.recomputed = sum(outcome.reasons.values())
    blocker.remove()
    return outcome


class Crash(AssertionError):
    """The blocker, or the model's call after it, raised."""


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class _Training:
    """A program in training, step by step."""

    def __init__(self, how: Circumstances, made: Made, blocker: halfway.ForwardBlocker, rng: random.Random) -> None:
        self.how, self.made, self.blocker, self.rng = how, made, blocker, rng
        self.optimizer = torch.optim.SGD(made.program.parameters(), 0.1)
        self.accumulated: dict[str, Any] = {}
        self.noise = torch.Generator().manual_seed(0)
        self.normal = torch.zeros(())

    def step(self, number: int) -> None:
        how, program = self.how, self.made.program
        if how.inserted and number == how.accumulate:
            self._insert(make_step(self.rng, how.half))
        reference = copy.deepcopy(program)
        original = copy.deepcopy(program).double() if how.half else None
        x = how.batch(self.made.n - (how.ragged and number == 1), self.made.side)
        before = Generators(program)
        known = self.blocker._counters.replayed_steps
        try:
            part = self.blocker(x)
            after = Generators(program)
            found = how.gradients(program, part)
        except FloatingPointError:
            raise
        except Exception as error:
            raise Crash(f"step {number}: {_one_line(error)}") from error
        end = Generators(program)
        replayed = self.blocker._counters.replayed_steps > known
        # None: the ratio rounds to no sample at all.
        rows = torch.arange(len(x)) if self.blocker.last is None else self.blocker.last.indices
        self._require(len(part) == halfway.functional.retained_count(len(x), self.made.ratio), number, "another count")
        if replayed:
            expected, own = as_documented(how, reference, x, rows, part, before, after)
        else:
            after.restore(reference)
            expected = how.gradients(reference, part)
            own = [[g.get_state() for g in own_generators(reference)]]
        way = "replayed" if replayed else "recomputed"
        self._require(found.keys() == expected.keys(), number, f"{way}, other parameters have gradients")
        if all(g.isfinite().all() for g in expected.values()):
            if how.half and replayed:
                documented = partial(self._in_float64, original, x, rows, before, after)
                exact = documented()
                self._compare(*(_flat(g, exact) for g in (found, expected, exact)), documented, number)
            else:
                scale = max((g.abs().max().item() for g in expected.values()), default=0.0)
                off = {n: (found[n] - g).abs().max().item() for n, g in expected.items()}
                worst = max(off, key=lambda n: np.nan_to_num(off[n], nan=np.inf), default="")
                near = not off or off[worst] <= how.tolerance * max(scale, 1e-3)
                self._require(
                    near, number, f"{way}, gradient of {worst} is off by {off.get(worst, 0):.2g} of {scale:.2g}"
                )
        left = next(differences(program.shallow, reference.shallow, how.tolerance), "")
        self._require(not left, number, f"{way}, left behind: shallow.{left}")
        left = next(differences(program.deep, reference.deep, how.tolerance), "")
        self._require(not left, number, f"{way}, left behind: deep.{left}")
        moved = end.difference(Generators(reference))
        self._require(not moved, number, f"{way}, {moved}")
        fits = any(all(map(torch.equal, end.own, states)) for states in own)
        self._require(fits, number, f"{way}, a generator that a step holds has another state")
        end.restore(program)
        self._learn(number, found)

    def _insert(self, step: Step) -> None:
        """Put another step in front, unless the program then overwrites what autograd needs."""
        tried = copy.deepcopy(self.made.program)
        tried.insert(0, copy.deepcopy(step))
        try:
            self.how.gradients(tried, self.how.batch(self.made.n, self.made.side))
        except RuntimeError:
            return
        self.made.program.insert(0, step)

    def _in_float64(
        self, program: Program, x: Tensor, rows: Tensor, before: Generators, after: Generators, noise: float = 0.0
    ) -> Gradients:
        """A replay as documented, of a program in float64, with a relative noise on what each step and layer gives."""
        program, x = copy.deepcopy(program), x.double()

        def disturb(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output * (1 + noise * torch.randn(output.shape, generator=self.noise, dtype=output.dtype))

        for module in [*program.steps(), *program.deep] if noise else []:
            module.register_forward_hook(disturb)
        return as_documented(self.how.exact(), program, x, rows, x[rows], before, after)[0]

    def _compare(
        self, found: Tensor, expected: Tensor, exact: Tensor, documented: Callable[..., Gradients], number: int
    ) -> None:
        """In half precision: found is about as far from what float64 gives as the reference is, or has been before, or
        as float64 itself is with noise as large as half precision rounds."""
        off = (found - exact).norm()
        self.normal = torch.maximum(self.normal, (expected - exact).norm())

        def near() -> bool:
            limit = 3 * self.normal + TOLERANCE_HALF * exact.norm() + 1e-3
            return bool(off <= limit) or not bool(exact.isfinite().all())

        if not near():
            for _ in range(4):
                rounded = documented(noise=torch.finfo(self.how.dtype).eps)
                self.normal = torch.maximum(self.normal, (_flat(rounded, rounded) - exact).norm())
        words = f"replayed, gradients are off by {off:.2g} of {exact.norm():.2g}, where {self.normal:.2g} is normal"
        self._require(near(), number, words)

    def _require(self, fulfilled: bool, number: int, words: str) -> None:
        if not fulfilled:
            raise Wrong(f"step {number}: {words}")

    def _learn(self, number: int, gradients: Gradients) -> None:
        for name, gradient in gradients.items():
            self.accumulated[name] = self.accumulated.get(name, 0) + gradient
        if (number + 1) % self.how.accumulate == 0:
            for name, parameter in self.made.program.named_parameters():
                parameter.grad = self.accumulated.get(name)
            # Clipped: a program that explodes only tests how rounding grows.
            nn.utils.clip_grad_norm_(self.made.program.parameters(), 1.0)
            self.optimizer.step()
            self.accumulated = {}


def _flat(gradients: Gradients, like: Gradients) -> Tensor:
    return torch.cat([gradients[name].flatten().double() for name in like])
