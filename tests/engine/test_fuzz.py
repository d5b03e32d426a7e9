"""Random programs: whatever the shallow part does, gradients, state and generators are what they should be."""

from __future__ import annotations

import copy
import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import halfway
from tests.fuzz.circumstances import TOLERANCE, Circumstances, Generators
from tests.fuzz.left_behind import differences
from tests.fuzz.programs import every_kind
from tests.fuzz.programs.ordinary import Conv, Norm
from tests.fuzz.training import as_documented, check, make
from tests.helpers import processes

KINDS = {f"{step.__name__}-{kind}" if kind else step.__name__: (step, kind) for step, kind in every_kind()}


def test_random_programs_train_exactly(request):
    """Each failure is a line; `python -m tests.fuzz.report --seed ...` runs that program again."""
    outcomes = [check(seed) for seed in range(request.config.getoption("--programs"))]
    replayed, recomputed = sum(o.replayed for o in outcomes), sum(o.recomputed for o in outcomes)
    print(f"{len(outcomes)} programs, {replayed} steps replayed, {recomputed} recomputed")
    failures = [o.line() for o in outcomes if o.verdict != "right"]
    assert not failures, "\n".join([f"{len(failures)} of {len(outcomes)} programs", *failures[:50]])
    assert replayed > len(outcomes), "hardly anything was replayed: this tests little"
    assert recomputed > len(outcomes) / 10, "hardly anything was recomputed: this tests little"


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_with_this_step_trains_exactly(kind):
    """Random programs may not contain each kind of step. Behind it come a convolution, which is replayed if anything
    is, and a BatchNorm, whose statistics tell whether samples count as apart."""
    step, name = KINDS[kind]
    for seed in range(2):
        rng = random.Random(seed)
        steps = [Conv(rng), step(rng, name), Conv(rng), *([Norm(rng)] if seed else [])]
        how = Circumstances(calm=seed == 1, uneven=seed == 1, channels_last=seed == 1)
        outcome = check(seed, how, steps=steps)
        assert outcome.verdict == "right", outcome.line()


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_for_all_samples_is_plain_training(kind):
    """A replay that retains every sample differs in nothing: notes and plain runs must agree, without an engine."""
    step, name = KINDS[kind]
    compared = 0
    for seed in range(3):
        rng = random.Random(seed)
        how = Circumstances(channels_last=seed == 1, whole=True)
        made = make(rng, how, steps=[Norm(rng), step(rng, name), Conv(rng)], families=("ordinary",))
        if made is None:
            continue
        x = how.batch(made.n, made.side)
        noted, plain = copy.deepcopy(made.program), made.program
        before = Generators(plain)
        expected = how.gradients(plain, x)
        after = Generators(plain)
        found, own = as_documented(how, noted, x, torch.arange(made.n), x, before, after)
        assert found.keys() == expected.keys()
        scale = max(g.abs().max() for g in expected.values())
        assert all((found[n] - g).abs().max() <= TOLERANCE * scale for n, g in expected.items())
        assert not list(differences(noted, plain, TOLERANCE))
        assert all(map(torch.equal, own[0], after.own))
        compared += 1
    assert compared


def train_in_processes(rank: int, programs: int) -> tuple[int, int]:
    """Random programs under DDP: gradients are the mean over ranks of what each rank's retained samples give."""
    warnings.simplefilter("ignore")
    replayed = recomputed = 0
    for seed in range(programs):
        torch.manual_seed(seed)
        random.seed(seed)
        how = Circumstances()
        rng = random.Random(seed)
        made = make(rng, how, families=("ordinary", "draws", "mixing", "folds", "places"))
        if made is None:
            continue
        program = made.program
        ddp = DDP(program, find_unused_parameters=True)
        blocker = halfway.ForwardBlocker(ddp, "cut", made.ratio, selector=halfway.Density(num_centroids=3))
        optimizer = torch.optim.SGD(program.parameters(), 0.1)
        for step in range(3):
            torch.manual_seed(1000 * rank + step)
            reference = copy.deepcopy(program)
            x = how.batch(made.n, made.side)
            before = Generators(program)
            part = blocker(x)
            after = Generators(program)
            known = blocker._counters.replayed_steps
            found = how.gradients(ddp, part, program)
            if blocker._counters.replayed_steps > known:
                expected, _ = as_documented(how, reference, x, blocker.last.indices, part, before, after)
            else:
                after.restore(reference)
                expected = how.gradients(reference, part)
            for name, parameter in program.named_parameters():
                mine = expected.get(name, torch.zeros_like(parameter))
                dist.all_reduce(mine)
                expected[name] = mine / dist.get_world_size()
            scale = max(*(g.abs().max().item() for g in expected.values()), 1e-3)
            for name, gradient in found.items():
                assert (gradient - expected[name]).abs().max() <= TOLERANCE * scale, (seed, name, program.describe())
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
    programs = max(20, request.config.getoption("--programs") // 10)
    for replayed, recomputed in processes.run(2, train_in_processes, programs, timeout=60 + programs):
        assert replayed > programs
        assert recomputed
