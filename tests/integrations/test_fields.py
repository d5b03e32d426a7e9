"""A trainer's batch through the blocker: its fields, its ids, its type."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import halfway
from halfway.integrations._fields import Fields


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return self.head(self.stem(x).relu()) * scale


class Sample(NamedTuple):
    x: Tensor
    y: Tensor


X, Y, IDS = torch.randn(8, 6), torch.arange(8) % 3, torch.arange(100, 108)


def blocker(model: nn.Module, **settings: Any) -> halfway.ForwardBlocker:
    return halfway.ForwardBlocker(model, "stem", 0.5, reuse="replay", **settings)


BATCHES = {
    "list": (Fields(), [X, Y], lambda b: b[0], lambda b: b[1]),
    "tuple": (Fields(), (X, Y), lambda b: b[0], lambda b: b[1]),
    "named tuple": (Fields(), Sample(X, Y), lambda b: b.x, lambda b: b.y),
    "the input second": (Fields(inputs=1), [Y, X], lambda b: b[1], lambda b: b[0]),
    "mapping": (Fields(), {"x": X, "y": Y}, lambda b: b["x"], lambda b: b["y"]),
    "another name": (Fields(inputs=["image"]), {"image": X, "y": Y}, lambda b: b["image"], lambda b: b["y"]),
    "ordered": (Fields(), OrderedDict(y=Y, x=X), lambda b: b["x"], lambda b: b["y"]),
    "user dict": (Fields(), UserDict(x=X, y=Y), lambda b: b["x"], lambda b: b["y"]),
    "read-only": (Fields(), MappingProxyType({"x": X, "y": Y}), lambda b: b["x"], lambda b: b["y"]),
    "one of a list": (Fields(), [X], lambda b: b[0], None),
    "a tensor": (Fields(), X, lambda b: b, None),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_the_batch_comes_back_as_it_was_with_fewer_samples(kind: str) -> None:
    fields, batch, x_of, y_of = BATCHES[kind]
    model = Net()
    block = blocker(model)
    retained = fields.retain(block, batch)
    assert block.last is not None
    rows = block.last.indices
    assert type(retained) is type(batch)
    assert torch.equal(x_of(retained), X[rows])
    if y_of is not None:
        assert torch.equal(y_of(retained), Y[rows])
    model(x_of(retained))  # reuse="replay": raises unless this is replayed
    assert block.stats.steps_replayed == 1
    assert x_of(batch) is X  # what came in was not touched
    if isinstance(batch, dict):
        assert list(retained) == list(batch)


@pytest.mark.parametrize(
    ("fields", "batch"),
    [
        (Fields(ids=2), (X, Y, IDS)),
        (Fields(ids=-1), [X, Y, IDS]),
        (Fields(ids="number"), {"x": X, "number": IDS}),
        (Fields(), {"x": X, "y": Y, "ids": IDS}),  # as WithIds names them
        (Fields(), {"x": X, "y": Y, "ids": IDS.tolist()}),
    ],
)
def test_ids_reach_the_selector_and_are_cut_like_the_rest(fields: Fields, batch: Any) -> None:
    block = blocker(Net(), selector="rotate")
    seen = []
    select = block.selector.select
    block.selector.select = lambda candidates, count: seen.append(candidates.ids) or select(candidates, count)
    retained = fields.retain(block, batch)
    assert torch.equal(seen[0], IDS)
    assert block.last is not None
    where = fields.ids if fields.ids is not None else "ids"
    assert torch.equal(retained[where], IDS[block.last.indices])
    block.prune_ratio = 0.0
    assert torch.equal(torch.as_tensor(fields.retain(block, batch)[where]), IDS)


@pytest.mark.parametrize(
    ("fields", "batch", "error", "message"),
    [
        (Fields(ids="ids"), {"x": X, "y": Y}, ValueError, r"field 'ids', but it has \['x', 'y'\].*WithIds"),
        (Fields(ids=2), (X, Y), ValueError, "field 2, but it has 2 fields"),
        (Fields(ids="ids"), (X, Y), ValueError, "field 'ids'"),
        (Fields(), {"x": X, "inputs": Y}, ValueError, "'inputs' has a name that halfway uses itself"),
        (Fields(), object(), TypeError, "a object.*collate_fn"),
        (Fields(), [], TypeError, "a list.*collate_fn"),
        (Fields(), {"image": X, "y": Y}, ValueError, r"inputs=\["),
    ],
)
def test_what_cannot_be_cut_says_so(fields: Fields, batch: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fields.retain(blocker(Net()), batch)


def test_the_model_may_be_called_with_more_than_the_inputs_that_were_named() -> None:
    model = Net()
    block = blocker(model)
    # With a number that only the deep part looks at, and without the labels, which were only cut.
    part = block(x=X, labels=Y, inputs=["x"])
    found = model(part["x"], scale=3.0)
    assert block.stats.steps_replayed == 1
    torch.testing.assert_close(found, 3 * model(part["x"]))
    part = block(x=X, labels=Y, inputs=["x"])
    model(part["x"], part["labels"])
    assert block.stats.steps_replayed == 2


def test_otherwise_it_must_be_called_as_the_blocker_saw() -> None:
    model = Net()
    block = halfway.ForwardBlocker(model, "stem", 0.5)
    part = block(x=X, labels=Y)
    with pytest.warns(UserWarning, match="other arguments"):
        model(**part, scale=3.0)
    part = block(x=X, labels=Y)
    model(part["x"])
    assert block.stats.recompute_reasons == {"the model was called with other arguments than the blocker saw": 2}
