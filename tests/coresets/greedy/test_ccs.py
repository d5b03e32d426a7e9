"""CCS: against a slow loop over bins, and the lists of beta."""

from __future__ import annotations

import pytest
import torch

from halfway.coresets import AUM, CCS, EL2N, Dynamics, Evidence, Forgetting, ShortRun
from halfway.coresets.greedy.ccs import BETAS, allocate, stratified
from tests.helpers.draws import generator, randn, within
from tests.helpers.evidence import evidence


def slow_counts(scores, count, bins):
    """What each bin gives, sample by sample: the smallest bins first, each an equal part of what is left."""
    low, high = min(scores), max(scores)
    width = (high - low) / bins
    sizes = [0] * bins
    for score in scores:
        k = 0
        while k < bins - 1 and score >= low + (k + 1) * width:
            k += 1
        sizes[k] += 1
    given = [0] * bins
    waiting = list(range(bins))
    left = count
    while waiting:
        k = min(waiting, key=lambda k: (sizes[k], k))
        given[k] = min(sizes[k], left // len(waiting))
        left -= given[k]
        waiting.remove(k)
    return sizes, given


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [5, 40, 90, 100])
def test_every_bin_gives_what_a_loop_says(seed, count):
    scores = randn(100, seed=seed).double()
    sizes, expected = slow_counts(scores.tolist(), count, 10)
    assert allocate(sizes, count) == expected
    found = stratified(scores, torch.arange(100), count, 10, generator(seed))
    low, high = float(scores.min()), float(scores.max())
    counts = [0] * 10
    for i in found.tolist():
        counts[min(9, int((float(scores[i]) - low) / ((high - low) / 10)))] += 1
    assert counts == expected
    assert len(set(found.tolist())) == count


def test_the_budget_is_always_used_up():
    source = generator(9)
    for _ in range(300):
        sizes = torch.randint(0, 9, (8,), generator=source).tolist()
        count = int(torch.randint(0, sum(sizes) + 1, (1,), generator=source))
        given = allocate(sizes, count)
        assert sum(given) == count
        assert all(g <= s for g, s in zip(given, sizes, strict=True))


def test_the_draw_within_a_bin_is_uniform():
    scores = torch.tensor([0.0] * 6 + [1.0] * 2)
    counts = torch.zeros(8)
    for seed in range(400):
        counts[stratified(scores, torch.arange(8), 4, 50, generator(seed))] += 1
    assert counts[6:].tolist() == [400, 400]
    assert all(within(count / 400, 2 / 6, 400) for count in counts[:6].tolist())


def test_the_hardest_are_cut():
    known = evidence()
    hardest = {"aum": AUM, "el2n": EL2N, "forgetting": Forgetting}
    for by, method in hardest.items():
        scores = method().score(known)
        found = CCS(by, beta=0.3).choose(known, 0.5, class_balance=False).ids
        assert len(found) == 30
        left_over = sorted(scores.tolist(), reverse=True)[18]  # the hardest that was not cut
        assert scores[found].max() <= left_over
    # Low margins are hard, large errors are hard.
    margins = known.dynamics.margins_N
    assert float(margins[CCS(beta=0.3).choose(known, 0.5, class_balance=False).ids].min()) > float(margins.min())


def test_each_score_brings_its_own_needs():
    assert (CCS().needs, tuple(CCS().uses)) == ("long run", ("dynamics",))
    assert (CCS("el2n").needs, tuple(CCS("el2n").uses)) == ("short runs", ("error_norms",))
    only = Evidence(torch.arange(40) % 2, 2, short_runs=[ShortRun(torch.rand(40, generator=generator()))])
    assert len(CCS("el2n").choose(only, 0.5)) == 20


def test_what_was_never_learned_has_a_finite_bin():
    record = Dynamics(8)
    for _ in range(3):
        record.observe(torch.arange(8), torch.tensor([[-1.0, 0.0]] * 4 + [[1.0, 0.0]] * 4), torch.zeros(8).long())
    known = Evidence(torch.zeros(8, dtype=torch.int64), 2, dynamics=record)
    found = CCS("forgetting", beta=0.0).choose(known, 0.5, class_balance=False).ids
    assert int((found < 4).sum()) == 2


@pytest.mark.parametrize("name", BETAS)
def test_a_list_gives_its_values_and_lines_between_them(name):
    method = CCS(beta=name)
    for ratio, beta in BETAS[name].items():
        assert method._beta(ratio) == pytest.approx(beta)
        assert beta <= ratio
    assert method._beta(0.95) == BETAS[name][0.9]
    assert method._beta(0.85) == pytest.approx((BETAS[name][0.8] + BETAS[name][0.9]) / 2)


def test_a_cut_that_leaves_too_few_is_refused():
    with pytest.raises(ValueError, match=r"cuts 12 of 20 samples, and 10 are to be retained; take a beta of at most"):
        CCS(beta=0.6).choose(evidence(), 0.5)
    assert len(CCS(beta=0.5).choose(evidence(), 0.5)) == 30
