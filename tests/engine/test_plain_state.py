"""State that a model keeps outside of parameters and buffers moves once per step, or the first batch is refused.

`drive` compares all of it with a model that only ever saw the retained samples.
"""

import array
import collections
import dataclasses
import itertools
import random
import types

import numpy as np
import pytest
import torch
from torch import nn

import halfway
from tests.helpers.state import drive

REUSE = pytest.mark.parametrize("reuse", ["auto", "recompute"])


@dataclasses.dataclass
class Record:
    calls: int = 0
    seen: list = dataclasses.field(default_factory=lambda: [[0], {"rows": 0}])


class Slots:
    __slots__ = ("calls", "seen")

    def __init__(self):
        self.calls, self.seen = 0, [0]


class Net(nn.Module):
    """`change(net, h)` runs before the cut or behind it, on what `keep()` made."""

    def __init__(self, keep, change, behind):
        super().__init__()
        self.a, self.cut, self.f = nn.Linear(6, 8), nn.Identity(), nn.Linear(8, 3)
        self.kept, self._change, self._behind = keep(), change, behind

    def forward(self, x):
        h = self.a(x)
        if not self._behind:
            self._change(self, h)
        h = self.cut(h)
        if self._behind:
            self._change(self, h)
        return self.f(h)


def changes(function):
    """From a function of what is kept and of the features."""
    return lambda net, h: function(net.kept, h.detach())


def replaces(function):
    """From a function that gives what is kept from now on."""

    def change(net, h):
        net.kept = function(net.kept, h.detach())

    return change


def several(*functions):
    def change(kept, h):
        for function in functions:
            function(kept, h)

    return changes(change)


def add(t, h):
    t += h.mean()


def bump_record(r, h):
    r.calls += 1
    r.seen[0][0] += len(h)
    r.seen[1]["rows"] += len(h)
    r.seen.append(h.mean(0))


def bump_slots(s, h):
    s.calls += 1
    s.seen.append(len(h))


def bump_namespace(n, h):
    n.total = n.total + h.sum(0)
    n.inner.calls += 1


def with_parent(parent):
    child = types.SimpleNamespace(calls=0, parent=None)
    child.parent = types.SimpleNamespace(child=child, list=[child])
    return child


def bump_nested(kept, h):
    kept[0][0].append(len(h))
    kept[1]["a"]["b"].add(len(kept[0][0]))
    kept[1]["a"]["n"] = kept[1]["a"].get("n", 0) + 1


class Tracker(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.register = 0, []
        self.register_buffer("n", torch.zeros(1))

    def forward(self, h):
        self.calls += 1
        self.n += len(h)
        self.register.append(h.mean())
        return h


KINDS = {
    "a tensor, in place": (lambda: torch.zeros(1), changes(add)),
    "a tensor, replaced": (lambda: torch.zeros(8), replaces(lambda t, h: t * 0.9 + h.mean(0))),
    "a tensor, through .data": (lambda: torch.zeros(8), changes(lambda t, h: t.data.add_(h.mean(0)))),
    "a tensor, resized": (lambda: torch.zeros(0, 8), replaces(lambda t, h: torch.cat([t, h])[-6:])),
    "a tensor, by set_": (lambda: torch.zeros(8), changes(lambda t, h: t.set_((t + h.mean(0)).untyped_storage()))),
    "a view of a tensor": (lambda: torch.zeros(4, 8)[1:3].T, changes(lambda t, h: t.add_(h.mean()))),
    "a tensor that is expanded": (lambda: torch.zeros(1).expand(5), changes(lambda t, h: t[:1].add_(h.mean()))),
    "a list": (list, changes(lambda k, h: k.append(len(h)))),
    "a list of tensors, in place": (lambda: [torch.zeros(1)], changes(lambda k, h: add(k[0], h))),
    "a list, cleared": (lambda: [1, 2], several(lambda k, h: k.clear(), lambda k, h: k.append(h.mean()))),
    "a list that is sorted": (lambda: [3, 1, 2], several(lambda k, h: k.sort(), lambda k, h: k.insert(0, k[-1] + 1))),
    "lists in lists": (lambda: [[[]], {"a": {"b": set()}}], changes(bump_nested)),
    "tuples of lists": (lambda: ([], ({},)), changes(lambda k, h: k[0].append(k[1][0].setdefault(len(k[0]), 1)))),
    "a deque": (collections.deque, changes(lambda k, h: k.append(1))),
    "a short deque": (lambda: collections.deque([0], 3), changes(lambda k, h: k.appendleft(k[0] + 1))),
    "a deque that rotates": (lambda: collections.deque(range(5)), changes(lambda k, h: k.rotate(1))),
    "a Counter": (collections.Counter, changes(lambda k, h: k.update(rows=len(h)))),
    "a dict of counters": (lambda: {"a": collections.Counter()}, changes(lambda k, h: k["a"].update(x=1))),
    "a defaultdict": (lambda: collections.defaultdict(list), changes(lambda k, h: k[len(k) % 3].append(1))),
    "an OrderedDict": (lambda: collections.OrderedDict(a=1, b=2), changes(lambda k, h: k.move_to_end(next(iter(k))))),
    "a dict, in another order": (
        lambda: {"a": 1, "b": 2},
        changes(lambda k, h: k.update({next(iter(k)): k.pop(next(iter(k)))})),
    ),
    "a set": (set, changes(lambda k, h: k.add(len(k)))),
    "a counter": (int, replaces(lambda k, h: k + 1)),
    "a number": (float, replaces(lambda k, h: 0.9 * k + len(h))),
    "a word": (str, replaces(lambda k, h: k + "x")),
    "an object": (Record, changes(bump_record)),
    "an object in a dict in a list": (lambda: [{"r": Record()}], changes(lambda k, h: bump_record(k[0]["r"], h))),
    "a namespace": (
        lambda: types.SimpleNamespace(total=torch.zeros(8), inner=types.SimpleNamespace(calls=0)),
        changes(bump_namespace),
    ),
    "objects that know each other": (lambda: with_parent(None), changes(lambda k, h: setattr(k, "calls", k.calls + 1))),
    "a new attribute": (int, lambda net, h: setattr(net, f"n{sum(k[0] == 'n' for k in vars(net))}", 1)),
    "an attribute that goes": (int, lambda net, h: vars(net).pop("gone", None) or setattr(net, "gone", 1)),
    "a module in a list": (lambda: [Tracker()], changes(lambda k, h: k[0](h))),
    "a module in an object": (lambda: types.SimpleNamespace(m=Tracker()), changes(lambda k, h: k.m(h))),
    "an attribute of a submodule": (int, lambda net, h: vars(net.f).update(calls=vars(net.f).get("calls", 0) + 1)),
    "an attribute of a parameter": (
        int,
        lambda net, h: vars(net.a.weight).update({f"call{len(vars(net.a.weight))}": 1}),
    ),
    "a gradient": (int, lambda net, h: setattr(net.a.weight, "grad", None)),
    "whether it trains": (int, lambda net, h: net.cut.train(not net.cut.training)),
    "what needs a gradient": (int, lambda net, h: net.f.bias.requires_grad_(not net.f.bias.requires_grad)),
    "a hook's handle": (list, lambda net, h: net.kept.append(net.f.register_forward_hook(lambda m, a, o: o * 1.5))),
}


@REUSE
@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("name", KINDS)
def test_plain_state_moves_once_per_step(name, behind, reuse):
    keep, change = KINDS[name]
    drive(lambda: Net(keep, change, behind), steps=4, reuse=reuse)


def test_plain_state_is_no_reason_to_recompute():
    for name in ("a tensor, in place", "a list", "a deque", "a counter", "an object", "lists in lists"):
        _, stats = drive(lambda name=name: Net(*KINDS[name], behind=False), steps=3)
        assert stats.steps_replayed == 3, (name, stats.recompute_reasons)


@pytest.mark.parametrize("kind", [list, dict, collections.deque])
def test_containers_stay_the_same_objects(kind):
    """Somebody else may hold them."""
    net = Net(kind, changes(lambda k, h: k.append(1) if hasattr(k, "append") else k.update({len(k): 1})), False)
    held = net.kept
    blocker = halfway.ForwardBlocker(net, "cut", 0.5, selector=halfway.Density(num_centroids=4))
    for step in range(3):
        net(blocker(torch.randn(8, 6)))
        assert net.kept is held
        assert len(held) == step + 1


# --- what cannot be undone -------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """`counter` is advanced before the cut."""

    def __init__(self, counter, advance):
        super().__init__()
        self.a, self.cut, self.f = nn.Linear(6, 8), nn.Identity(), nn.Linear(8, 3)
        self.register_buffer("n", torch.zeros(1))
        self.counter, self.advance, self.calls, self.hooked = counter, advance, [], False

    def forward(self, x):
        self.n += 1
        self.calls.append(1)
        if not self.hooked:
            self.f.register_forward_hook(lambda m, args, out: None)
            self.hooked = True
        if self.advance is not None:
            self.advance(self.counter)
        return self.f(self.cut(self.a(x)))


def generator_function():
    yield from range(100)


OPAQUE = {
    "itertools.count": (itertools.count, next),
    "itertools.cycle": (lambda: itertools.cycle([1, 2, 3]), next),
    "an iterator": (lambda: iter(range(100)), next),
    "a list's iterator": (lambda: iter([1] * 100), next),
    "a generator": (generator_function, next),
    "random.Random": (lambda: random.Random(0), lambda c: c.random()),
    "numpy.random.Generator": (lambda: np.random.default_rng(0), lambda c: c.random()),
    "numpy.random.RandomState": (lambda: np.random.RandomState(0), lambda c: c.rand()),
}


@REUSE
@pytest.mark.parametrize("name", OPAQUE)
def test_state_that_cannot_be_undone_is_refused_in_the_first_second(name, reuse):
    keep, advance = OPAQUE[name]
    model = Counting(keep(), advance)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=halfway.Density(num_centroids=4), reuse=reuse)
    with pytest.raises((TypeError, RuntimeError), match="counter"):
        blocker(torch.randn(8, 6))
    blocker.remove()
    assert model.calls == []
    assert not model.hooked
    assert not model.f._forward_hooks
    for n, t in model.state_dict().items():
        assert torch.equal(t, before[n])
    model(torch.randn(8, 6)).sum().backward()


@REUSE
@pytest.mark.parametrize("name", OPAQUE)
def test_such_state_in_an_object_is_refused_too(name, reuse):
    keep, advance = OPAQUE[name]
    model = Counting([types.SimpleNamespace(inner=keep())], lambda c: advance(c[0].inner))
    blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=halfway.Density(num_centroids=4), reuse=reuse)
    with pytest.raises((TypeError, RuntimeError), match="counter"):
        blocker(torch.randn(8, 6))
    assert model.calls == []


@REUSE
@pytest.mark.parametrize("name", OPAQUE)
def test_such_state_that_nobody_moves_is_no_harm(name, reuse):
    model = Counting(OPAQUE[name][0](), None)
    blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=halfway.Density(num_centroids=4), reuse=reuse)
    for _ in range(2):
        model(blocker(torch.randn(8, 6))).sum().backward()
    assert len(model.calls) == 2
    assert reuse == "recompute" or blocker.stats.steps_replayed == 2


@REUSE
@pytest.mark.parametrize("name", OPAQUE)
def test_such_state_behind_the_cut_moves_once_per_step(name, reuse):
    """Nothing behind the cut runs but in the model's own call."""
    keep, advance = OPAQUE[name]
    model = Net(keep, lambda net, h: drawn.append(advance(net.kept)), behind=True)
    fresh, drawn = keep(), []
    blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=halfway.Density(num_centroids=4), reuse=reuse)
    for _ in range(3):
        model(blocker(torch.randn(8, 6)))
    assert drawn == [advance(fresh) for _ in range(3)]


def slot_step(s):
    s.calls += 1
    s.seen.append(1)


MUTABLE = {
    "an array of NumPy": (lambda: np.zeros(3), lambda c: c.__iadd__(1), lambda c: c.tolist()),
    "an array": (lambda: array.array("d", [0.0]), lambda c: c.append(1.0), lambda c: c.tolist()),
    "bytes": (lambda: bytearray(b"a"), lambda c: c.extend(b"b"), bytes),
    "slots": (Slots, slot_step, lambda c: (c.calls, len(c.seen))),
}


@REUSE
@pytest.mark.parametrize("name", MUTABLE)
def test_other_mutable_state_moves_once_per_step_or_is_refused(name, reuse):
    keep, advance, value = MUTABLE[name]
    model, plain = Counting(keep(), advance), Counting(keep(), advance)
    blocker = halfway.ForwardBlocker(model, "cut", 0.5, selector=halfway.Density(num_centroids=4), reuse=reuse)
    for _ in range(3):
        x = torch.randn(8, 6)
        try:
            retained = blocker(x)
        except (TypeError, RuntimeError) as error:
            assert "counter" in str(error)  # noqa: PT017
            return
        model(retained)
        plain(x)
        assert value(model.counter) == value(plain.counter)
