"""Random: everybody equally often, and the model never runs for it."""

import pytest
import torch

from halfway import ForwardBlocker, Random, Schedule
from tests.helpers.at_the_cut import Net, candidates


def test_random_never_runs_the_model():
    model = Net()
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    blocker = ForwardBlocker(model, None, 0.5, selector="random", schedule=Schedule(1, 4, unit="step"))
    for i in range(6):
        assert len(blocker(torch.randn(8, 4))) == (4 if 1 <= i < 4 else 8)
    assert calls == []
    assert model.calls == 0
    assert "forward" not in vars(model)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_random_draws_every_sample_equally_often(ratio):
    size, steps = 16, 1500
    blocker = ForwardBlocker(Net(), None, ratio, selector=Random(), seed=3)
    x = torch.randn(size, 4)
    drawn = torch.zeros(size)
    together = 0
    for _ in range(steps):
        blocker(x)
        indices = blocker.last.indices
        assert len(indices.unique()) == size - round(ratio * size)
        drawn[indices] += 1
        together += bool((indices == 0).any() and (indices == 1).any())
    p = 1 - ratio
    sd = (steps * p * (1 - p)) ** 0.5
    assert (drawn - steps * p).abs().max() < 4.5 * sd
    pair = p * (size * p - 1) / (size - 1)
    assert abs(together - steps * pair) < 4.5 * (steps * pair * (1 - pair)) ** 0.5


def test_neighbouring_seeds_draw_independently():
    size = 64
    x = torch.randn(size, 4)
    agreement = []
    for seed in range(20):
        chosen = []
        for s in (seed, seed + 1):
            with ForwardBlocker(Net(), None, 0.5, selector="random", seed=s) as blocker:
                for _ in range(2):
                    blocker(x)
                    chosen.append(set(blocker.last.indices.tolist()))
        agreement += [len(a & b) for i, a in enumerate(chosen) for b in chosen[:i]]
    assert abs(sum(agreement) / len(agreement) - size / 4) < 1


def test_random_has_no_importance_and_a_sorted_choice():
    selection = Random().select(candidates(size=20), 7)
    assert selection.importance is None
    assert selection.weights is None
    assert selection.indices.tolist() == sorted(set(selection.indices.tolist()))
    assert len(selection.indices) == 7
