"""The blocker in a training loop: identical where it should be, one line everywhere else."""

import copy
import gc
import io
import json
import random
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfway
from halfway import Density, ForwardBlocker, Random, ReplayError, Schedule

CLASSES = 5


class Net(nn.Module):
    """A small CNN with everything that could go out of step: BatchNorm, dropout, all three generators."""

    def __init__(self, batch_norm=True, dropout=0.2):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if batch_norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.block = nn.Conv2d(8, 8, 3, padding=1)
        self.deep = nn.Conv2d(8, 16, 3, stride=2)
        self.deep_norm = nn.BatchNorm2d(16) if batch_norm else nn.Identity()
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.drop(F.relu(self.norm(self.stem(x))))
        x = self.block(x) * (1 + 0.1 * random.random()) * (1 + 0.1 * np.random.rand())  # noqa: NPY002
        x = F.dropout(F.relu(self.deep_norm(self.deep(x))), 0.1, self.training)
        return self.head(x.mean((2, 3)))


class Plain(nn.Module):
    """No BatchNorm, no randomness."""

    def __init__(self, width=6):
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.deep = nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.deep(F.relu(self.stem(x)))


def batches(count, size=10, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 3, 8, 8, generator=g), torch.randint(CLASSES, (size,), generator=g)) for _ in range(count)
    ]


def vectors(count, size=10, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 4, generator=g), torch.randint(CLASSES, (size,), generator=g)) for _ in range(count)]


def seed_all(seed=3):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def generators():
    """The global generators, as something that `==` compares."""
    numpy_state = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist(), numpy_state[2:]


def identical(a, b):
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[k], theirs[k]) for k in ours)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def hooks_of(model):
    """Every hook and patched forward in a model; empty for an untouched one."""
    found = []
    for name, module in model.named_modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            found += [(name, kind)] * len(getattr(module, kind))
        found += [(name, method) for method in ("forward", "_call_impl") if method in vars(module)]
    found += [("global", "forward_pre")] * len(nn.modules.module._global_forward_pre_hooks)
    return found


def selections(blocker, model, optimizer, data):
    chosen = []
    for x, y in data:
        train_step(model, optimizer, *blocker(x, y))
        chosen.append(blocker.last.indices.tolist())
    return chosen


# ------------------------------------------------------------------------------------------ identity


@pytest.mark.parametrize("reuse", ["auto", "replay", "recompute"])
@pytest.mark.parametrize(
    ("ratio", "schedule", "epoch"),
    [(0.0, None, 0), (0.4, Schedule(5, 9), 4), (0.4, Schedule(5, 9), 9), (0.4, Schedule(20, None, "step"), None)],
    ids=["ratio 0", "before the window", "after the window", "before the first step"],
)
def test_training_is_bit_identical_where_nothing_is_pruned(ratio, schedule, epoch, reuse):
    plain = Net()
    model = copy.deepcopy(plain)
    data = batches(20)

    seed_all()
    optimizer = optimizer_of(plain)
    for x, y in data:
        train_step(plain, optimizer, x, y)
    expected = generators()

    seed_all()
    blocker = ForwardBlocker(model, "block", ratio, schedule=schedule, reuse=reuse)
    optimizer = optimizer_of(model)
    for x, y in data:
        if epoch is not None:
            blocker.set_epoch(epoch)
        x_, y_ = blocker(x, y)
        assert x_ is x
        assert y_ is y
        train_step(model, optimizer, x_, y_)

    assert generators() == expected
    assert identical(model, plain)
    assert blocker.last is None
    assert blocker.stats.relative_flops == 1


@pytest.mark.parametrize("selector", ["density", "random"])
def test_recompute_is_bit_identical_to_training_on_the_retained_samples(selector):
    plain = Net()
    model = copy.deepcopy(plain)
    data = batches(20)
    if selector == "density":
        selector = Density(num_centroids=4)

    seed_all()
    blocker = ForwardBlocker(model, "block", 0.4, reuse="recompute", selector=selector)
    chosen = selections(blocker, model, optimizer_of(model), data)
    after = generators()

    seed_all()
    optimizer = optimizer_of(plain)
    for (x, y), rows in zip(data, chosen, strict=True):
        assert len(rows) == 6
        train_step(plain, optimizer, x[rows], y[rows])
    assert generators() == after
    assert identical(model, plain)


def test_the_generators_after_the_blocker_are_those_before_it_when_recomputing():
    model = Net()
    blocker = ForwardBlocker(model, "block", 0.4, reuse="recompute")
    for x, y in batches(3):
        before = generators()
        blocker(x, y)
        assert generators() == before


def test_replay_moves_each_torch_generator_once_per_step():
    """Dropout in the shallow part draws in the probe, the deep part in the model's call: nothing is drawn twice."""
    model = Net(batch_norm=False)
    blocker = ForwardBlocker(model, "block", 0.4)
    data = batches(3)
    x, y = blocker(*data[0])
    model(x)
    for x, y in data[1:]:
        before = torch.get_rng_state()
        x_, _ = blocker(x, y)
        model(x_)
        ours = torch.get_rng_state()
        torch.set_rng_state(before)
        F.dropout(torch.ones(len(x), 8, 8, 8), 0.2)
        F.dropout(torch.ones(len(x_), 16, 3, 3), 0.1)
        assert torch.equal(ours, torch.get_rng_state())
    assert blocker.stats.steps_replayed == 3


# ----------------------------------------------------------------------- outside of the schedule, eval


def test_outside_the_schedule_nothing_runs_twice_and_the_estimator_sees_every_sample():
    model = Net()
    selector = Density(num_centroids=16)
    blocker = ForwardBlocker(model, "block", 0.5, selector=selector, schedule=Schedule(5))
    blocker.set_epoch(0)
    calls = []
    model.stem.register_forward_hook(lambda *_: calls.append(1))
    optimizer = optimizer_of(model)
    for i, (x, y) in enumerate(batches(6)):
        calls.clear()
        train_step(model, optimizer, *blocker(x, y))
        if i > 0:
            assert len(calls) == 1
        assert selector.estimator.counts.sum() == (i + 1) * len(x)


def test_in_the_window_the_shallow_part_runs_twice_and_the_estimator_sees_the_retained():
    model = Net()
    selector = Density(num_centroids=4)
    blocker = ForwardBlocker(model, "block", 0.4, selector=selector)
    calls = []
    model.stem.register_forward_hook(lambda *_: calls.append(1))
    deep = []
    model.deep.register_forward_hook(lambda module, args, out: deep.append(len(out)))
    optimizer = optimizer_of(model)
    for i, (x, y) in enumerate(batches(4)):
        calls.clear()
        deep.clear()
        train_step(model, optimizer, *blocker(x, y))
        if i > 0:
            assert len(calls) == 2
            assert deep == [6]
        assert selector.estimator.counts.sum() == (i + 1) * 6


def test_a_validation_pass_between_steps_does_not_teach_the_estimator():
    model = Plain()
    selector = Density(num_centroids=4)
    blocker = ForwardBlocker(model, "stem", 0.5, selector=selector, schedule=Schedule(5))
    blocker.set_epoch(0)
    x, _ = blocker(*vectors(1)[0])
    model.eval()
    model(torch.randn(7, 4))
    model.train()
    with torch.no_grad():
        model(torch.randn(7, 4))
    assert selector.estimator is None
    model(x)
    assert selector.estimator.counts.sum() == len(x)


@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_without_training_the_batch_comes_back_untouched(how):
    model = Net()
    blocker = ForwardBlocker(model, "block", 0.5)
    calls = []
    model.stem.register_forward_hook(lambda *_: calls.append(1))
    (x, y), before, state = batches(1)[0], generators(), copy.deepcopy(model.state_dict())
    values = x.clone()
    if how == "eval":
        model.eval()
    with torch.set_grad_enabled(how != "no_grad"):
        x_, y_ = blocker(x, y)
        assert x_ is x
        assert y_ is y
        assert blocker(x) is x
        named = blocker(x=x, y=y)
        assert named["x"] is x
        assert named["y"] is y
    assert not calls
    assert generators() == before
    assert torch.equal(x, values)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert hooks_of(model) == [("stem", "_forward_hooks")]
    assert blocker.stats.steps == 0


# ------------------------------------------------------------------------------------ the first batch


class Repeating(Net):
    def forward(self, x):
        return super().forward(self.block(self.stem(x))[:, :3])


@pytest.mark.parametrize(
    ("model", "at", "words"),
    [(Repeating(), "block", "more than once"), (nn.Sequential(Net(), nn.Identity()), "0.nothing", "never runs")],
)
@pytest.mark.parametrize("schedule", [None, Schedule(5)])
def test_a_wrong_cut_is_an_error_on_the_first_batch_also_before_the_window(model, at, words, schedule):
    if words == "never runs":
        model[0].nothing = nn.Linear(2, 2)
    blocker = ForwardBlocker(model, at, 0.5, schedule=schedule)
    blocker.set_epoch(0)
    (x, y), before, state = batches(1)[0], generators(), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=words):  # noqa: PT012 (that it runs twice only shows in the model's own call)
        x, y = blocker(x, y)
        assert generators() == before
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        model(x)
    assert hooks_of(model) == []


@pytest.mark.parametrize(("reuse", "more"), [("auto", [4, 8, 8]), ("recompute", [])])
@pytest.mark.parametrize("build", [Net, Plain])
def test_the_first_pruned_batch_costs_three_shallow_forwards_more(build, reuse, more):
    """One on the retained number of samples, two on all; a steady step is one on all, one on the retained."""
    model, seen, deep = build(), [], []
    model.stem.register_forward_pre_hook(lambda m, args: seen.append(len(args[0])))
    model.deep.register_forward_pre_hook(lambda m, args: deep.append(len(args[0])))
    blocker = ForwardBlocker(model, "block" if isinstance(model, Net) else "stem", 0.5, reuse=reuse)
    for step in range(3):
        x, _ = (batches if isinstance(model, Net) else vectors)(1)[0]
        model(blocker(x[:8])).sum().backward()
        assert sorted(seen) == sorted([8, 4, *(more if step == 0 else [])])
        assert deep == [4]
        seen.clear()
        deep.clear()


@pytest.mark.parametrize("schedule", [None, Schedule(5)])
@pytest.mark.parametrize("reuse", ["auto", "recompute"])
def test_the_first_batch_leaves_weights_and_buffers_as_they_were(schedule, reuse):
    model = Net()
    blocker = ForwardBlocker(model, "block", 0.5, schedule=schedule, reuse=reuse)
    blocker.set_epoch(0)
    (x, y), before, state = batches(1)[0], generators(), copy.deepcopy(model.state_dict())
    values = x.clone()
    part = blocker(x, y)
    assert len(part[0]) == (10 if schedule else 5)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(x, values)
    assert all(p.grad is None for p in model.parameters())
    if schedule is not None or reuse == "recompute":
        assert generators() == before
    model(part[0])


def test_replay_that_is_demanded_and_not_possible_is_an_error_on_the_first_batch_also_before_the_window():
    class Mixing(Plain):
        def forward(self, x):
            return self.deep(self.stem(x - x.mean(0)))

    model = Mixing()
    blocker = ForwardBlocker(model, "stem", 0.5, schedule=Schedule(5), reuse="replay")
    blocker.set_epoch(0)
    with pytest.raises(ReplayError, match="depends on other samples"):
        blocker(*vectors(1)[0])
    assert hooks_of(model) == []


# ------------------------------------------------------------------------------------------ the choice


def run_with_seed(seed, **settings):
    torch.manual_seed(0)
    model = Plain()
    blocker = ForwardBlocker(model, "stem", 0.5, seed=seed, **settings)
    return selections(blocker, model, optimizer_of(model), vectors(8))


@pytest.mark.parametrize("selector", [lambda: "random", lambda: Density(num_centroids=8, noise=0.5)])
def test_the_same_seed_gives_the_same_choice_and_another_seed_another(selector):
    assert run_with_seed(1, selector=selector()) == run_with_seed(1, selector=selector())
    assert run_with_seed(1, selector=selector()) != run_with_seed(2, selector=selector())


def test_the_choice_does_not_depend_on_the_global_generators():
    first = run_with_seed(1)
    torch.manual_seed(77)
    assert run_with_seed(1) == first


def test_steps_draw_different_samples():
    model = Plain()
    blocker = ForwardBlocker(model, None, 0.5, selector="random")
    x = torch.randn(32, 4)
    blocker(x)
    first = blocker.last.indices
    blocker(x)
    assert not torch.equal(first, blocker.last.indices)


def test_shuffling_the_batch_permutes_the_selection():
    torch.manual_seed(0)
    model = Plain()
    fill, (x, y) = vectors(1, size=16)[0], vectors(1, size=24, seed=9)[0]
    order = torch.randperm(24)
    chosen = []
    for rows in (torch.arange(24), order):
        twin = copy.deepcopy(model)
        blocker = ForwardBlocker(twin, "stem", 0.5, selector=Density(8, noise=0), schedule=Schedule(1, unit="step"))
        twin(blocker(*fill)[0])
        twin(blocker(x[rows], y[rows])[0])
        chosen.append(rows[blocker.last.indices].sort().values)
    assert torch.equal(*chosen)
    assert len(chosen[0]) == 12
    assert not torch.equal(chosen[0], torch.arange(12))


def test_every_part_is_cut_to_the_rows_that_last_names():
    model = Plain()
    blocker = ForwardBlocker(model, "stem", 0.3)
    for x, y in vectors(3):
        x_, y_, index = blocker(x, y, torch.arange(10))
        selection = blocker.last
        assert isinstance(selection, halfway.Selection)
        assert selection.indices.dtype == torch.int64
        assert torch.equal(index, selection.indices)
        assert torch.equal(x_, x[selection.indices])
        assert torch.equal(y_, y[selection.indices])
        assert torch.equal(selection.indices, selection.indices.unique())
        assert selection.importance.shape == (10,)
        assert selection.weights is None
        model(x_)


@pytest.mark.parametrize(
    ("size", "ratio", "count"), [(10, 0.3, 7), (128, 0.3, 90), (1, 0.9, 1), (3, 0.9, 1), (5, 0.5, 3)]
)
def test_the_count_is_exact_and_at_least_one(size, ratio, count):
    blocker = ForwardBlocker(Plain(), None, ratio, selector="random")
    assert len(blocker(torch.randn(size, 4))) == count


# -------------------------------------------------------------------------------------- schedule, state


def test_a_schedule_in_steps_prunes_in_its_window_and_needs_no_epochs():
    model = Plain()
    blocker = ForwardBlocker(model, "stem", 0.5, schedule=Schedule(2, 4, unit="step"))
    lengths = []
    for x, _ in vectors(6):
        x = blocker(x)
        model(x)
        lengths.append(len(x))
        model.eval()
        blocker(torch.randn(3, 4))  # not a training batch: does not count
        model.train()
    assert lengths == [10, 10, 5, 5, 10, 10]


def test_set_epoch_opens_and_closes_the_window():
    model = Plain()
    blocker = ForwardBlocker(model, "stem", 0.5, schedule=Schedule(1, 3))
    lengths = []
    for epoch in range(4):
        blocker.set_epoch(epoch)
        for x, _ in vectors(2):
            x = blocker(x)
            model(x)
            lengths.append(len(x))
        assert (blocker.last is None) == (epoch in (0, 3))
    assert lengths == [10, 10, 5, 5, 5, 5, 10, 10]


@pytest.mark.parametrize("interrupted", [0, 1, 5])
def test_a_saved_state_continues_with_identical_selections(interrupted):
    data = vectors(10)

    def start():
        torch.manual_seed(0)
        model = Plain()
        blocker = ForwardBlocker(
            model, "stem", 0.5, selector=Density(8, noise=0.1), schedule=Schedule(1, unit="step"), seed=4
        )
        return model, blocker, torch.optim.SGD(model.parameters(), 0.05)

    def run(model, blocker, optimizer, data):
        chosen = []
        for x, y in data:
            train_step(model, optimizer, *blocker(x, y))
            chosen.append(blocker.last.indices.tolist() if blocker.last else None)
        return chosen

    model, blocker, optimizer = start()
    uninterrupted = run(model, blocker, optimizer, data)

    model, blocker, optimizer = start()
    run(model, blocker, optimizer, data[:interrupted])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "blocker": blocker.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed, second, optimizer = start()
    resumed.load_state_dict(state["model"])
    second.load_state_dict(state["blocker"])
    assert second.stats == blocker.stats
    assert run(resumed, second, optimizer, data[interrupted:]) == uninterrupted[interrupted:]
    assert second.stats.samples_seen == 100


def test_the_state_remembers_the_epoch():
    model = Plain()
    with ForwardBlocker(model, "stem", 0.5, schedule=Schedule(1, 3)) as blocker:
        blocker.set_epoch(2)
        state = blocker.state_dict()
    blocker = ForwardBlocker(model, "stem", 0.5, schedule=Schedule(1, 3))
    blocker.load_state_dict(state)
    assert len(model(blocker(vectors(1)[0][0]))) == 5


# ------------------------------------------------------------------------------------------ the batch


def test_one_part_comes_back_as_itself_several_as_a_tuple_names_as_a_dict():
    model = Plain()
    blocker = ForwardBlocker(model, "stem", 0.5)
    x, y = vectors(1)[0]
    one = blocker(x)
    assert isinstance(one, torch.Tensor)
    model(one)
    both = blocker(x, y)
    assert isinstance(both, tuple)
    model(both[0])
    named = blocker(x=x, target=y)
    assert list(named) == ["x", "target"]
    assert len(named["x"]) == len(named["target"]) == 5
    model(x=named["x"])
    assert blocker.stats.recompute_reasons == {}
    assert blocker.stats.steps_replayed == 3


class TwoInputs(Plain):
    def forward(self, a, b):
        return super().forward(a * b)


def test_a_tuple_goes_to_the_model_as_positionals():
    model = TwoInputs()
    blocker = ForwardBlocker(model, "stem", 0.5)
    a, b, y = torch.randn(8, 4), torch.randn(8, 4), torch.arange(8)
    (a_, b_), y_ = blocker((a, b), y)
    assert torch.equal(a_, a[y_])
    assert torch.equal(b_, b[y_])
    model(a_, b_)
    assert blocker.stats.steps_replayed == 1


def test_a_dict_goes_to_the_model_as_keywords_in_any_order():
    model = TwoInputs()
    blocker = ForwardBlocker(model, "stem", 0.5)
    batch, y = {"b": torch.randn(8, 4), "a": torch.randn(8, 4)}, torch.arange(8)
    part, y_ = blocker(batch, y)
    assert torch.equal(part["a"], batch["a"][y_])
    model(part["a"], part["b"])
    assert blocker.stats.steps_replayed == 1


def test_inputs_says_which_parts_go_to_the_model():
    model = TwoInputs()
    blocker = ForwardBlocker(model, "stem", 0.5)
    a, b, y = torch.randn(8, 4), torch.randn(8, 4), torch.arange(8)
    y_, a_, b_ = blocker(y, a, b, inputs=(1, 2))
    assert torch.equal(a_, a[y_])
    model(a_, b_)
    part = blocker(y=y, left=a, right=b, a=a, inputs=None, b=b)
    model(part["a"], b=part["b"])
    assert torch.equal(part["left"], part["a"])
    assert blocker.stats.steps_replayed == 2

    one = Plain()
    with ForwardBlocker(one, "stem", 0.5) as blocker:
        y_, a_ = blocker(y, a, inputs=1)
        one(a_)
        assert torch.equal(a_, a[y_])
        assert blocker.stats.steps_replayed == 1


def test_inputs_names_parts_for_a_model_with_open_keywords():
    class Open(Plain):
        def forward(self, **batch):
            return super().forward(batch["pixels"])

    model = Open()
    blocker = ForwardBlocker(model, "stem", 0.5)
    pixels, y = torch.randn(8, 4), torch.arange(8)
    with pytest.raises(ValueError, match=r"inputs=\["):
        blocker(pixels=pixels, y=y)
    part = blocker(pixels=pixels, y=y, inputs=["pixels"])
    model(pixels=part["pixels"])
    assert torch.equal(part["pixels"], pixels[part["y"]])
    assert blocker.stats.steps_replayed == 1


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config).train()


@pytest.mark.parametrize("style", ["dict", "keywords"])
def test_a_bert_called_with_a_dict_trains_as_on_the_retained_samples(style):
    model = bert()
    plain = copy.deepcopy(model)
    blocker = ForwardBlocker(model, "bert.encoder.layer.0.output", 0.5)
    mask = torch.ones(8, 7, dtype=torch.int64)
    mask[::2, 5:] = 0
    batch = {"input_ids": torch.randint(50, (8, 7)), "attention_mask": mask, "labels": torch.randint(3, (8,))}
    for _ in range(2):
        part = blocker(batch) if style == "dict" else blocker(**batch)
        rows = blocker.last.indices
        assert len(rows) == 4
        assert all(torch.equal(part[k], v[rows]) for k, v in batch.items())
        model.zero_grad()
        plain.zero_grad()
        model(**part).loss.backward()
        plain(**{k: v[rows] for k, v in batch.items()}).loss.backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    assert blocker.stats.steps_replayed == 2


# ------------------------------------------------------------------------------------------------ stats


def test_stats_count_samples_steps_and_operations():
    model = Net(batch_norm=False, dropout=0.0)
    blocker = ForwardBlocker(model, "block", 0.4, schedule=Schedule(1, 4, unit="step"))
    assert blocker.stats.steps == 0
    assert blocker.stats.relative_flops == 1
    optimizer = optimizer_of(model)
    for x, y in batches(5):
        train_step(model, optimizer, *blocker(x, y))
    stats = blocker.stats
    assert (stats.steps, stats.pruned_steps) == (5, 3)
    assert (stats.samples_seen, stats.samples_retained) == (50, 38)
    assert stats.effective_ratio == pytest.approx(12 / 50)
    assert (stats.steps_replayed, stats.steps_recomputed) == (3, 0)
    assert stats.operations_replayed == 2 * 3
    assert stats.operations_computed == 0
    assert stats.recompute_reasons == {}
    share = blocker._engine.meter.shallow_share
    assert stats.relative_flops == pytest.approx((2 * 10 + 3 * (6 + 4 * share)) / 50)
    assert set(stats.as_dict()) == set(vars(stats)) - {"recompute_reasons", "diagnostics"}


def test_relative_flops_is_the_retained_share_plus_the_probe_of_the_pruned():
    """Counted by hand: a forward of 12 and 6 multiplications, and a backward without gradients for the input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    blocker = ForwardBlocker(model, "0", 0.4)
    for x, _ in vectors(3):
        model(blocker(x)).sum().backward()
    stats = blocker.stats
    assert stats.steps_replayed == 3
    share = blocker._engine.meter.shallow_share
    assert stats.relative_flops == pytest.approx(0.6 + 0.4 * share)
    assert 12 / (3 * 18) - 1e-9 <= share <= 12 / (18 + 18 + 6) + 1e-9


def test_relative_flops_of_recomputed_steps_pays_the_shallow_part_of_the_retained_twice():
    model = Net(batch_norm=False)
    blocker = ForwardBlocker(model, "block", 0.4, reuse="recompute")
    for x, _ in batches(3):
        model(blocker(x))
    share = blocker._engine.meter.shallow_share
    stats = blocker.stats
    assert 0 < share < 0.5
    assert stats.relative_flops == pytest.approx(0.6 + share)
    assert stats.steps_recomputed == 3
    assert list(stats.recompute_reasons.values()) == [3]


def test_random_without_a_probe_costs_the_retained_share_alone():
    blocker = ForwardBlocker(Plain(), None, 0.4, selector=Random())
    blocker(torch.randn(10, 4))
    assert blocker.stats.relative_flops == pytest.approx(0.6)
    assert blocker.stats.effective_ratio == pytest.approx(0.4)


# ------------------------------------------------------------------------------- models with a life of their own


class Remembering(Plain):
    """Counts its calls and collects an auxiliary loss in each, in the shallow and in the deep part."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.losses = []
        self.deep_shapes = {}

    def forward(self, x):
        self.calls += 1
        self.losses.append(x.square().mean() * self.stem.weight.sum())
        x = self.stem(x)
        self.deep_shapes[self.calls] = len(x)
        return self.deep(x)


@pytest.mark.parametrize("reuse", ["auto", "recompute"])
@pytest.mark.parametrize("schedule", [None, Schedule(2, unit="step")])
def test_attributes_move_once_per_step(reuse, schedule):
    model = Remembering()
    blocker = ForwardBlocker(model, "stem", 0.5, reuse=reuse, schedule=schedule)
    optimizer = optimizer_of(model)
    for i, (x, y) in enumerate(vectors(4)):
        x, y = blocker(x, y)
        assert model.calls == i
        assert len(model.losses) == i
        train_step(model, optimizer, x, y)
        assert model.calls == i + 1
        assert len(model.losses) == i + 1
        assert model.losses[-1].requires_grad
    pruned = [10, 10, 5, 5] if schedule else [5, 5, 5, 5]
    assert list(model.deep_shapes.values()) == pruned


class Overwriting(Plain):
    def forward(self, x):
        x.mul_(2).add_(1)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:halfway computes")
@pytest.mark.parametrize("reuse", ["auto", "recompute"])
def test_a_model_that_changes_its_input_trains_right_and_leaves_the_batch_alone(reuse):
    model = Overwriting()
    plain = copy.deepcopy(model)
    blocker = ForwardBlocker(model, "stem", 0.5, reuse=reuse)
    optimizer, reference = optimizer_of(model), optimizer_of(plain)
    for x, y in vectors(5):
        before = x.clone()
        x_, y_ = blocker(x, y)
        rows = blocker.last.indices
        assert torch.equal(x_, before[rows])
        train_step(model, optimizer, x_, y_)
        assert torch.equal(x, before)
        train_step(plain, reference, before[rows], y[rows])
    assert identical(model, plain)


def test_a_model_that_changes_its_input_is_recomputed_with_one_warning():
    model = Overwriting()
    blocker = ForwardBlocker(model, "stem", 0.5)
    first, *others = vectors(3)
    with pytest.warns(UserWarning, match="changes its input in place"):
        x = blocker(first[0])
    model(x)
    for x, _ in others:
        model(blocker(x))  # a second warning would be an error
    assert blocker.stats.recompute_reasons == {"the model changes its input in place": 3}


# ------------------------------------------------------------------------------------------ beginning and end


def test_the_cut_may_be_given_as_a_module():
    model = Net()
    blocker = ForwardBlocker(model, model.block, 0.5)
    assert json.loads(blocker.state_dict()["config"])["at"] == "block"
    assert len(model(blocker(batches(1)[0][0]))) == 5
    with pytest.raises(ValueError, match="not a submodule"):
        ForwardBlocker(Net(), model.block, 0.5)


def test_two_blockers_on_one_model_are_refused_until_the_first_is_removed():
    model = Net()
    first = ForwardBlocker(model, "block", 0.5)
    with pytest.raises(ValueError, match="remove"):
        ForwardBlocker(model, "stem", 0.5)
    ForwardBlocker(Net(), "stem", 0.5)
    first.remove()
    first.remove()
    second = ForwardBlocker(model, "stem", 0.5)
    assert len(model(second(batches(1)[0][0]))) == 5


def test_the_end_of_a_with_block_removes_the_blocker():
    model = Net()
    with ForwardBlocker(model, "block", 0.5) as blocker:
        x = blocker(batches(1)[0][0])
        assert len(x) == 5
        assert "_call_impl" in vars(model)
    assert hooks_of(model) == []
    with pytest.raises(RuntimeError, match="removed"):
        blocker(batches(1)[0][0])


@pytest.mark.filterwarnings("ignore:halfway computes")
@pytest.mark.parametrize("reuse", ["auto", "replay", "recompute"])
@pytest.mark.parametrize("schedule", [None, Schedule(5)])
@pytest.mark.parametrize("called", [False, True], ids=["model not called", "model called"])
def test_remove_leaves_no_trace_in_the_model(reuse, schedule, called):
    model = Net()
    with ForwardBlocker(model, "block", 0.5, reuse=reuse, schedule=schedule) as blocker:
        blocker.set_epoch(0)
        x = blocker(batches(1)[0][0])
        if called:
            model(x)
            assert hooks_of(model) == []
        elif schedule is None and reuse != "recompute":
            assert "_call_impl" in vars(model)
    assert hooks_of(model) == []
    ForwardBlocker(model, "block", 0.5)


@pytest.mark.filterwarnings("ignore:halfway computes")
def test_an_error_in_the_loop_passes_through_the_with_block_of_a_demanded_replay():
    model = Net()

    def loop():
        with ForwardBlocker(model, "block", 0.5, reuse="replay") as blocker:
            return len(blocker(batches(1)[0][0])) // 0

    with pytest.raises(ZeroDivisionError):
        loop()
    assert hooks_of(model) == []


@pytest.mark.filterwarnings("ignore:halfway computes")
@pytest.mark.parametrize("reuse", ["auto", "recompute"])
@pytest.mark.parametrize("schedule", [None, Schedule(5)])
@pytest.mark.parametrize("called", [False, True], ids=["model not called", "model called"])
def test_a_blocker_that_is_forgotten_leaves_no_trace_in_the_model(reuse, schedule, called):
    model = Net()
    blocker = ForwardBlocker(model, "block", 0.5, reuse=reuse, schedule=schedule)
    blocker.set_epoch(0)
    x = blocker(batches(1)[0][0])
    if called:
        model(x)
    alive = weakref.ref(blocker)
    del blocker
    gc.collect()
    assert alive() is None
    assert hooks_of(model) == []
    ForwardBlocker(model, "block", 0.5)


def test_a_forward_that_is_already_patched_stays_patched():
    model = Plain()
    calls = []
    inner = model.forward

    def patched(x):
        calls.append(1)
        return inner(x)

    model.forward = patched
    blocker = ForwardBlocker(model, "stem", 0.5)
    for x, _ in vectors(2):
        model(blocker(x))
    assert blocker.stats.steps_replayed == 2
    blocker.remove()
    assert model.forward is patched
    assert calls


def test_a_model_can_be_copied_and_saved_after_a_step():
    model = Net()
    blocker = ForwardBlocker(model, "block", 0.5)
    model(blocker(batches(1)[0][0]))
    copied = copy.deepcopy(model)
    assert identical(copied, model)
    torch.save(model, io.BytesIO())
