"""Random programs: whatever the shallow part does, gradients, buffers and generators are what they should be."""

from __future__ import annotations

import copy
import random
import warnings
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import halfway
from halfway.selectors import Ranking
from tests import processes
from tests.programs import CHANNELS, Dropout, Norm, Note, Program

# In float64, relative to the largest gradient of the program: rounding stays below 1e-10, an error does not. Under
# autocast to bfloat16 a program may amplify rounding, so there the same program in float64 says how much is normal.
TOLERANCE = 1e-8
TOLERANCE_AUTOCAST = 0.05


def largest(tensors) -> float:
    return max((t.abs().max().item() for t in tensors), default=0.0)


@dataclass(frozen=True)
class Circumstances:
    """How a program is trained. accumulate: batches per optimizer step. whole: blocked at its output, not the cut."""

    autocast: bool = False
    channels_last: bool = False
    accumulate: int = 1
    whole: bool = False

    @classmethod
    def draw(cls, rng: random.Random) -> Circumstances:
        return cls(rng.random() < 0.2, rng.random() < 0.3, rng.choice([1, 1, 2]), rng.random() < 0.25)

    def blocker(self, program: Program, ratio: float, rng: random.Random) -> halfway.ForwardBlocker:
        if self.whole:
            return halfway.ForwardBlocker(program, None, ratio, selector=Output())
        density = halfway.Density(num_centroids=rng.choice([1, 3]))
        return halfway.ForwardBlocker(program, "cut", ratio, selector=density)

    def batch(self, n: int, side: int) -> torch.Tensor:
        x = torch.randn(n, CHANNELS, side, side, dtype=torch.float32 if self.autocast else torch.float64)
        return x.to(memory_format=torch.channels_last) if self.channels_last else x

    def gradients(self, called, x, program=None) -> dict[str, torch.Tensor]:
        """Of the model that is called, which may be a wrapper of the program."""
        program = program or called
        program.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            out = called(x)
        out.double().square().sum().backward()
        return {n: p.grad.clone() for n, p in program.named_parameters() if p.grad is not None}

    @property
    def tolerance(self) -> float:
        return TOLERANCE_AUTOCAST if self.autocast else TOLERANCE


class Output(Ranking):
    """Ranks by what the program returns."""

    name = "output"
    needs = "outputs"

    def importance(self, candidates):
        return candidates.outputs


def generators():
    return torch.get_rng_state(), random.getstate()


def set_generators(state) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])


def replay_reference(how: Circumstances, program, x, indices, x_retained, before, after):
    """Gradients as documented for a replay: all samples first, then the retained ones with their side information."""
    note = Note()
    program.set_note(note)
    deep = copy.deepcopy(program.deep.state_dict())
    set_generators(before)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=how.autocast):
        program(x)
    if not how.whole:
        program.deep.load_state_dict(deep)
    note.rows = indices
    set_generators(after)
    grads = how.gradients(program, x_retained)
    program.set_note(None)
    return grads


def make_program(rng: random.Random, how: Circumstances) -> tuple[Program, int, int, float] | None:
    """A program, batch size, side and prune ratio; None if autograd needs a value that the program overwrites."""
    program = Program(rng, how.whole).train()
    if how.autocast and any(isinstance(m, Norm) for m in program.modules()):
        # In bfloat16 the reference's BatchNorm rounds differently, and a maximum behind it then takes another way.
        return None
    if how.autocast:
        program = program.float()
    if how.channels_last:
        program = program.to(memory_format=torch.channels_last)
    # Behind a random draw an operation is trusted when 16 rows have been compared.
    draws = any(isinstance(m, Dropout) for m in program.modules())
    n = rng.choice([5, 32, 41] if draws else [2, 3, CHANNELS, 5, 7])
    side = rng.choice([2, 3])
    ratio = rng.choice([0.4, 0.5, 0.7])
    # PyTorch's own BatchNorm backward is wrong on the CPU for a single sample when only one of input and gradient has
    # strides like (C, 1, W C, C) (seen in 2.8 and 2.15, without halfway), so these programs retain at least two.
    while any(isinstance(m, Norm) for m in program.modules()) and halfway.functional.retained_count(n, ratio) < 2:
        n += 1
    try:
        how.gradients(copy.deepcopy(program), how.batch(n, side))
    except RuntimeError:
        return None
    return program, n, side, ratio


def check_program(rng: random.Random, how: Circumstances | None = None, steps: int = 3) -> tuple[int, int]:
    """Train a random program for a few steps, compare each; returns steps replayed and recomputed."""
    how = how or Circumstances()
    made = make_program(rng, how)
    if made is None:
        return 0, 0
    program, n, side, ratio = made
    blocker = how.blocker(program, ratio, rng)
    optimizer = torch.optim.SGD(program.parameters(), 0.1)
    accumulated: dict[str, torch.Tensor] = {}
    for step in range(steps * how.accumulate):
        reference, original = copy.deepcopy(program), copy.deepcopy(program)
        x = how.batch(n, side)
        before = generators()
        x_retained = blocker(x)
        after = generators()
        assert len(x_retained) == halfway.functional.retained_count(n, ratio)
        replayed = blocker._counters.replayed_steps
        grads = how.gradients(program, x_retained)
        replayed = blocker._counters.replayed_steps > replayed
        end = generators()
        if replayed:
            expected = replay_reference(how, reference, x, blocker.last.indices, x_retained, before, after)
            assert end[1] == after[1]
        else:
            set_generators(after)
            expected = how.gradients(reference, x_retained)
            assert end[1] == random.getstate()
        assert torch.equal(end[0], torch.get_rng_state())
        assert grads.keys() == expected.keys()
        about = (program.describe(), how, n, ratio, blocker.stats)
        if how.autocast and replayed:
            exact = original.double(), x.double(), blocker.last.indices, x_retained.double(), before, after
            assert_as_good(grads, expected, replay_reference(Circumstances(whole=how.whole), *exact), about)
        else:
            assert_close(grads, expected, how.tolerance * max(largest(expected.values()), 1e-3), about)
        for (name, mine), theirs in zip(program.named_buffers(), reference.buffers(), strict=True):
            assert largest([mine - theirs]) <= how.tolerance * max(largest([theirs]), 1), (name, about)
        set_generators(end)
        for name, grad in grads.items():
            accumulated[name] = accumulated.get(name, 0) + grad
        if (step + 1) % how.accumulate == 0:
            for name, parameter in program.named_parameters():
                parameter.grad = accumulated.get(name)
            # Clipped: a program that explodes only tests how rounding grows.
            nn.utils.clip_grad_norm_(program.parameters(), 1.0)
            optimizer.step()
            accumulated = {}
    stats = blocker.stats
    blocker.remove()
    return stats.steps_replayed, stats.steps_recomputed


def assert_as_good(found, expected, exact, about) -> None:
    """Found is about as far from what float64 gives as the reference is."""
    found, expected, exact = (
        torch.cat([g[name].flatten() for name in exact]).double() for g in (found, expected, exact)
    )
    assert (found - exact).norm() <= 3 * (expected - exact).norm() + TOLERANCE_AUTOCAST * exact.norm() + 1e-3, about


def assert_close(found, expected, tolerance: float, about) -> None:
    for name, value in expected.items():
        assert largest([found[name] - value]) <= tolerance, (name, about)


def test_random_programs_train_exactly(request):
    counts = [0, 0, 0]

    @settings(
        max_examples=request.config.getoption("--programs"),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False))
    def run(rng):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            replayed, recomputed = check_program(rng, Circumstances.draw(rng))
        counts[0] += 1
        counts[1] += replayed
        counts[2] += recomputed

    run()
    print(f"{counts[0]} programs, {counts[1]} steps replayed, {counts[2]} recomputed")
    assert counts[1] > counts[0], "hardly anything was replayed: this tests little"
    assert counts[2] > counts[0] / 10, "hardly anything was recomputed: this tests little"


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_train_exactly_with_any_seed(seed):
    """The same without Hypothesis, which draws simple programs first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(5):
            check_program(random.Random(1000 * seed + i), Circumstances(whole=i % 2 == 1))


def train_in_processes(rank: int, programs: int) -> tuple[int, int]:
    """Random programs under DDP: gradients are the mean over ranks of what each rank's retained samples give."""
    warnings.simplefilter("ignore")
    replayed = recomputed = 0
    for seed in range(programs):
        torch.manual_seed(seed)
        how = Circumstances()
        made = make_program(random.Random(seed), how)
        if made is None:
            continue
        program, n, side, ratio = made
        ddp = DDP(program, find_unused_parameters=True)
        blocker = halfway.ForwardBlocker(ddp, "cut", ratio, selector=halfway.Density(num_centroids=3))
        optimizer = torch.optim.SGD(program.parameters(), 0.1)
        for step in range(3):
            torch.manual_seed(1000 * rank + step)
            reference = copy.deepcopy(program)
            x = how.batch(n, side)
            before = generators()
            x_retained = blocker(x)
            after = generators()
            known = blocker._counters.replayed_steps
            grads = how.gradients(ddp, x_retained, program)
            if blocker._counters.replayed_steps > known:
                expected = replay_reference(how, reference, x, blocker.last.indices, x_retained, before, after)
            else:
                set_generators(after)
                expected = how.gradients(reference, x_retained)
            for name, parameter in program.named_parameters():
                mine = expected.get(name, torch.zeros_like(parameter))
                dist.all_reduce(mine)
                expected[name] = mine / dist.get_world_size()
            scale = max(largest(expected.values()), 1e-3)
            assert_close(grads, {n: g for n, g in expected.items() if n in grads}, TOLERANCE * scale, seed)
            nn.utils.clip_grad_norm_(program.parameters(), 1.0)
            optimizer.step()
            states = [None, None]
            dist.all_gather_object(states, blocker.selector.state_dict())
            assert all(torch.equal(states[0][k], states[1][k]) for k in ("centroids", "counts"))
        replayed += blocker.stats.steps_replayed
        recomputed += blocker.stats.steps_recomputed
        blocker.remove()
    return replayed, recomputed


def test_random_programs_train_exactly_in_two_processes(request):
    programs = max(40, request.config.getoption("--programs") // 10)
    for replayed, recomputed in processes.run(2, train_in_processes, programs, timeout=60 + programs):
        assert replayed > programs
        assert recomputed
