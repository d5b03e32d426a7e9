"""The linear head that learns on the way: each step against a slow loop, on one rank and on two."""

import math

import pytest
import torch
import torch.nn.functional as F

from halfway.state.online_head import OnlineHead
from halfway.state.ranks import Ranks
from tests.helpers import processes
from tests.helpers.draws import generator, randn
from tests.helpers.remembered import through_a_file

D, C = 5, 4


def batch(step, size=12):
    """Features of several scales that drift, soft targets, and a sample in six without a label."""
    x = randn(size, D, seed=step) * torch.tensor([1.0, 10.0, 0.1, 3.0, 1.0]) + 5 + 0.3 * step
    targets = (2 * randn(size, C, seed=100 + step)).softmax(1)
    labelled = torch.arange(size) % 6 != 4
    return x, torch.where(labelled.unsqueeze(1), targets, 0.0), labelled


class Slow:
    """The same head in float64, one sample at a time."""

    def __init__(self):
        self.W, self.b = [[0.0] * D for _ in range(C)], [0.0] * C
        self.vW, self.vb = [[0.0] * D for _ in range(C)], [0.0] * C
        self.mean, self.var, self.batches = [0.0] * D, [0.0] * D, 0

    def standard(self, row):
        floor = 1e-3 * sum(self.var) / D + 1e-8 * sum(m * m for m in self.mean) / D
        return [(row[d] - self.mean[d]) / math.sqrt(self.var[d] + floor + 1e-38) for d in range(D)]

    def predict(self, row):
        z = self.standard(row)
        logits = [self.b[c] + sum(self.W[c][d] * z[d] for d in range(D)) for c in range(C)]
        largest = max(logits)
        total = sum(math.exp(v - largest) for v in logits)
        return [math.exp(v - largest) / total for v in logits]

    def learn(self, x, targets, labelled):
        rows = [(r, t) for r, t, known in zip(x.tolist(), targets.tolist(), labelled.tolist(), strict=True) if known]
        surplus = [[p - t for p, t in zip(self.predict(row), target, strict=True)] for row, target in rows]
        rate, n = max(1 / (self.batches + 1), 0.1), len(rows)
        for d in range(D):
            values = [row[d] for row, _ in rows]
            own = sum(values) / n
            variance = sum((v - own) ** 2 for v in values) / n
            apart = own - self.mean[d]
            self.var[d] = (1 - rate) * self.var[d] + rate * variance + rate * (1 - rate) * apart**2
            self.mean[d] += rate * apart
        z = [self.standard(row) for row, _ in rows]
        for c in range(C):
            self.vb[c] = 0.9 * self.vb[c] + sum(s[c] for s in surplus) / n
            self.b[c] -= 0.05 * self.vb[c]
            for d in range(D):
                gradient = sum(s[c] * row[d] for s, row in zip(surplus, z, strict=True)) / n
                self.vW[c][d] = 0.9 * self.vW[c][d] + gradient
                self.W[c][d] -= 0.05 * self.vW[c][d]
        self.batches += 1


def taught(steps, head=None, first=0):
    head = head or OnlineHead(D, C)
    for step in range(first, first + steps):
        head.learn(*batch(step))
    return head


def bits(head):
    return {name: value.clone() for name, value in head.state_dict().items()}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_it_learns_as_a_slow_loop_does():
    head, slow = OnlineHead(D, C), Slow()
    for step in range(25):
        x, targets, labelled = batch(step)
        expected = torch.tensor([slow.predict(row) for row in x.double().tolist()], dtype=torch.float64)
        torch.testing.assert_close(head.log_probabilities(x).exp().double(), expected, rtol=1e-3, atol=1e-4)
        head.learn(x, targets, labelled)
        slow.learn(x.double(), targets.double(), labelled)
    found = head.state_dict()
    weights = torch.cat([torch.tensor(slow.W), torch.tensor(slow.b).unsqueeze(1)], 1)
    torch.testing.assert_close(found["weights"], weights, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found["mean"], torch.tensor(slow.mean), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["variance"], torch.tensor(slow.var), rtol=1e-3, atol=1e-4)
    assert found["weights"].abs().max() > 0.1


def test_the_first_batches_count_alike_in_the_statistics():
    head, x = OnlineHead(D, C), torch.cat([batch(step)[0] for step in range(3)])
    for part in x.split(12):
        head.learn(part, torch.full((12, C), 1 / C), torch.ones(12, dtype=torch.bool))
    torch.testing.assert_close(head.state_dict()["mean"], x.mean(0))
    torch.testing.assert_close(head.state_dict()["variance"], x.var(0, correction=0), rtol=1e-4, atol=1e-6)


def test_an_untrained_head_knows_nothing():
    head = OnlineHead(D, C)
    assert torch.equal(head.log_probabilities(1e6 * randn(3, D)), torch.full((3, C), 1 / C).log())


@pytest.mark.parametrize("value", [0.0, 7.0, -1e4])
def test_inputs_that_never_change_stay_harmless(value):
    head = OnlineHead(D, C)
    for step in range(60):
        _, targets, labelled = batch(step)
        x = torch.full((12, D), value)
        head.learn(x, targets, labelled)
    assert all(tensor.isfinite().all() for tensor in head.state_dict().values())
    assert head.state_dict()["weights"][:, :-1].abs().max() < 1e-2  # only the bias has learned
    assert not head.refused.take()


@pytest.mark.parametrize("seen", [0, 3])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_batch_that_is_not_finite_teaches_nothing_and_is_noted(seen, value):
    head = taught(seen)
    before = bits(head)
    x, targets, labelled = batch(9)
    x[4, 1] = value  # also in a row without a label
    head.learn(x, targets, labelled)
    assert_same(bits(head), before)
    assert head.refused.take()
    head.learn(*batch(10))
    assert head.state_dict()["batches"] == seen + 1
    assert not head.refused.take()


def test_samples_without_a_label_teach_nothing():
    head, alone = taught(3), taught(3)
    x, targets, labelled = batch(7)
    head.learn(x, targets, labelled)
    alone.learn(x[labelled], targets[labelled], labelled[labelled])
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(head.state_dict()[name], value)
    before = bits(head)
    head.learn(x, torch.zeros_like(targets), torch.zeros_like(labelled))
    assert_same(bits(head), before)
    assert not head.refused.take()


def test_a_state_goes_on_bit_for_bit():
    head, again = taught(4), OnlineHead(D, C)
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in head.state_dict().items()}
    again.load_state_dict(through_a_file(head.state_dict()))
    assert_same(bits(taught(4, again, 4)), bits(taught(4, head, 4)))


def test_a_state_of_another_size_is_refused_and_changes_nothing():
    head = taught(2)
    before = bits(head)
    for other in (OnlineHead(D + 1, C).state_dict(), OnlineHead(D, C + 1).state_dict(), {}):
        with pytest.raises(ValueError, match=r"5 inputs and 4 classes has a tensor 'weights' of shape \(4, 6\)"):
            head.load_state_dict(other)
    with pytest.raises(ValueError, match="'batches'"):
        head.load_state_dict({**OnlineHead(D, C).state_dict(), "batches": None})
    assert_same(bits(head), before)


def test_features_of_half_precision_are_learned_in_float32():
    head, expected = OnlineHead(D, C), OnlineHead(D, C)
    x, targets, labelled = batch(0)
    head.learn(x.bfloat16(), targets, labelled)
    expected.learn(x.bfloat16().float(), targets, labelled)
    assert_same(bits(head), bits(expected))


def test_it_learns_what_can_be_learned():
    head, centres = OnlineHead(D, C), 3 * F.one_hot(torch.arange(C), D).float()
    for step in range(60):
        classes = torch.randint(C, (32,), generator=generator(step))
        x = 100 * (centres[classes] + 0.3 * randn(32, D, seed=step))
        right = (head.log_probabilities(x).argmax(1) == classes).float().mean()
        head.learn(x, F.one_hot(classes, C).float(), torch.ones(32, dtype=torch.bool))
    assert right == 1


# ------------------------------------------------------------------------------------------------- several ranks


def learn_on(rank, steps, bad):
    """Each rank has its part of the batch; a rank without batches sends nothing."""
    ranks, head = Ranks(), OnlineHead(D, C)
    for step in range(max(steps)):
        if step >= steps[rank]:
            ranks.send_nothing()
            continue
        x, targets, labelled = batch(step)
        mine = slice(0, 5) if rank == 0 else slice(5, 12)
        if (rank, step) == bad:
            x[mine] = math.nan
        head.learn(x[mine], targets[mine], labelled[mine], ranks)
    return head.state_dict(), head.refused.take()


def test_two_ranks_learn_the_same_and_what_one_learns_from_both():
    (first, _), (second, _) = processes.run(2, learn_on, (6, 6), None)
    assert_same(first, second)
    for name, value in taught(6).state_dict().items():
        torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-5)


def test_a_rank_without_batches_and_one_that_is_not_finite():
    (first, noted), (second, also) = processes.run(2, learn_on, (6, 4), (1, 2))
    assert_same(first, second)
    assert (noted, also) == (True, True), "both ranks report what spoiled the step of both"
    assert first["batches"] == 5


def test_skill_is_what_predictions_gain_on_equal_chances():
    """Measured before the head learns from the batch, averaged as the statistics are; one class per sample."""
    head, gain, steps = OnlineHead(D, C), 0.0, 25
    assert head.skill == 0
    for step in range(steps):
        classes = torch.arange(12) % C
        x = torch.cat([F.one_hot(classes, C).float(), torch.ones(12, 1)], 1) + 0.1 * randn(12, D, seed=step)
        labelled = torch.arange(12) % 6 != 4
        correct = head.log_probabilities(x).double()[torch.arange(12), classes][labelled].tolist()
        rate = max(1 / (step + 1), 0.1)
        gain = (1 - rate) * gain + rate * (math.log(C) + sum(correct) / len(correct))
        head.learn(x, F.one_hot(classes, C) * labelled.unsqueeze(1).float(), labelled)
    assert 0.3 < float(head.skill) < 1
    assert float(head.skill) == pytest.approx(gain / math.log(C), rel=1e-4)
