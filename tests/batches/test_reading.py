"""How lists in a batch are read: by what they are, never by sizes that happen to coincide."""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from halfway import ForwardBlocker
from halfway.batches.reading import leaves
from halfway.functional import retained_count


class Boxes(NamedTuple):
    boxes: Tensor
    labels: Tensor


@dataclasses.dataclass
class Target:
    boxes: Tensor
    labels: Tensor


class Instances:
    """As detection libraries have them: an object that nobody outside looks into."""

    def __init__(self, boxes: Tensor, labels: Tensor) -> None:
        self.boxes, self.labels = boxes, labels


class Named:
    def __init__(self, boxes: Tensor, labels: Tensor) -> None:
        self.boxes, self.labels = boxes, labels

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, rows: Any) -> Named:
        return Named(self.boxes[rows], self.labels[rows])


RECORDS: dict[str, Any] = {
    "dict": lambda boxes, labels: {"boxes": boxes, "labels": labels},
    "OrderedDict": lambda boxes, labels: OrderedDict(boxes=boxes, labels=labels),
    "nested dict": lambda boxes, labels: {"annotations": {"boxes": boxes}, "labels": labels},
    "dict of arrays": lambda boxes, labels: {"boxes": boxes.numpy(), "labels": labels.numpy()},
    "dict with a name": lambda boxes, labels: {"boxes": boxes, "image_id": 7, "file": "a.png"},
    "dataclass": Target,
    "named tuple": Boxes,
    "object": Instances,
    "object with a length": Named,
    "list of dicts": lambda boxes, labels: [{"bbox": box} for box in boxes],
    "tuple of dicts": lambda boxes, labels: tuple({"bbox": box} for box in boxes),
}


def blocked(ratio: float = 0.5) -> ForwardBlocker:
    return ForwardBlocker(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)), None, ratio, selector="random")


def entry(kind: str, i: int, boxes: int) -> Any:
    return RECORDS[kind](torch.arange(4.0 * boxes).view(boxes, 4) + 100 * i, torch.arange(boxes) + 10 * i)


def assert_cut(cut: Any, whole: Any, indices: Tensor) -> None:
    """One entry per sample: the very entries of the retained ones, untouched."""
    assert type(cut) is type(whole)
    assert len(cut) == len(indices)
    assert all(found is whole[i] for found, i in zip(cut, indices.tolist(), strict=True))


# --------------------------------------------------------------------------------- lists of mappings and objects


@pytest.mark.parametrize("container", [list, tuple])
@pytest.mark.parametrize("kind", RECORDS)
def test_a_list_of_records_has_one_entry_per_sample_whatever_is_in_it(kind: str, container: Any) -> None:
    """Above all where each record holds as many boxes as there are samples."""
    for size, boxes in itertools.product((2, 3, 4, 8), (1, 2, 3, 4, 8)):
        blocker = blocked()
        targets = container(entry(kind, i, boxes) for i in range(size))
        x, cut = blocker(torch.randn(size, 5), targets)
        assert blocker.last is not None
        assert len(x) == len(blocker.last.indices) == retained_count(size, 0.5)
        assert_cut(cut, targets, blocker.last.indices)
        blocker.remove()


@pytest.mark.parametrize("missing", [None, [], ()])
@pytest.mark.parametrize("kind", ["dict", "dataclass", "list of dicts"])
def test_entries_may_be_missing(kind: str, missing: Any) -> None:
    for size in (2, 4):
        blocker = blocked()
        targets = [missing, *(entry(kind, i, size) for i in range(1, size))]
        _, cut = blocker(torch.randn(size, 5), targets)
        assert blocker.last is not None
        assert_cut(cut, targets, blocker.last.indices)


@pytest.mark.parametrize("where", ["by name", "in a dict", "in a tuple", "in a dataclass"])
def test_a_list_of_records_is_found_wherever_it_is(where: str) -> None:
    size = 2
    x, targets = torch.randn(size, 5), [entry("dict", i, size) for i in range(size)]
    blocker = blocked()
    if where == "by name":
        cut = blocker(input=x, labels=targets)["labels"]
    elif where == "in a dict":
        cut = blocker(x, {"y": torch.arange(size), "targets": targets})[1]["targets"]
    elif where == "in a tuple":
        cut = blocker(x, (torch.arange(size), targets, torch.randn(size)))[1][1]
    else:
        cut = blocker(x, Target(torch.randn(size, 4), targets))[1].labels
    assert blocker.last is not None
    assert_cut(cut, targets, blocker.last.indices)


@pytest.mark.parametrize("kind", ["dict", "dataclass", "object", "list of dicts"])
def test_a_list_of_records_of_another_length_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"batch\[1\] has 3 entries, but the model's input has 4 samples"):
        blocked()(torch.randn(4, 5), [entry(kind, i, 2) for i in range(3)])


@pytest.mark.parametrize("size", [2, 8])
def test_views_that_hold_all_samples_go_into_a_dict_or_by_themselves(size: int) -> None:
    """Not into a list: of two samples and two views nobody could tell which is meant."""
    x, views = torch.randn(size, 5), [{"view": torch.randn(size, 3)} for _ in range(2)]
    if size != 2:
        with pytest.raises(
            ValueError, match=r"batch\[1\] has 2 entries.*by themselves \(blocker\(x, a, b\)\) or in a dict"
        ):
            blocked()(x, views)
    for parts in ((x, *views), (x, dict(enumerate(views)))):
        blocker = blocked()
        cut = blocker(*parts)[-1]
        assert blocker.last is not None
        cut = cut if "view" in cut else cut[1]
        assert torch.equal(cut["view"], views[1]["view"][blocker.last.indices])


# -------------------------------------------------------------------------------------------- lists of tensors


def boxes_of(size: int, boxes: int, kind: Any = torch.as_tensor) -> list[Any]:
    return [kind(torch.arange(4.0 * boxes).view(boxes, 4) + 100 * i) for i in range(size)]


@pytest.mark.parametrize("kind", [torch.as_tensor, Tensor.numpy])
@pytest.mark.parametrize("first", [3, 8])
def test_tensors_per_sample_stay_per_sample_in_a_batch_where_they_could_be_parts(first: int, kind: Any) -> None:
    blocker = blocked()
    for size, boxes in ((first, 2), (2, 2), (4, 4), (5, 1), (3, 3)):
        listed = boxes_of(size, boxes, kind)
        _, cut = blocker(torch.randn(size, 5), listed)
        assert blocker.last is not None
        assert_cut(cut, listed, blocker.last.indices)


def test_parts_stay_parts_in_a_batch_where_they_could_be_samples() -> None:
    blocker = blocked()
    for size in (8, 2, 5, 2):
        parts = [torch.randn(size), torch.randn(size)]
        _, cut = blocker(torch.randn(size, 5), parts)
        assert blocker.last is not None
        assert all(torch.equal(a, b[blocker.last.indices]) for a, b in zip(cut, parts, strict=True))


@pytest.mark.parametrize("container", [list, tuple])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_tensors_that_could_be_samples_or_parts_are_refused_if_nothing_tells(size: int, container: Any) -> None:
    blocker, listed = blocked(), container(boxes_of(size, size))
    with pytest.raises(ValueError, match=rf"batch\[1\] is a {container.__name__} of {size} tensors.*dict per sample"):
        blocker(torch.randn(size, 5), listed)
    assert blocker.stats.steps == 0
    # As the message says: in dicts, or by themselves.
    blocker(torch.randn(size, 5), [{"boxes": boxes} for boxes in listed])
    blocker(torch.randn(size, 5), *listed)
    # Or after a batch of another size.
    blocker(torch.randn(size + 1, 5), container(boxes_of(size + 1, size)))
    _, cut = blocker(torch.randn(size, 5), listed)
    assert blocker.last is not None
    assert_cut(cut, listed, blocker.last.indices)


def test_a_refused_batch_teaches_nothing() -> None:
    blocker = blocked()
    with pytest.raises(ValueError, match=r"batch\[2\] has 7 entries"):
        blocker(torch.randn(4, 5), boxes_of(4, 2), torch.randn(7))
    with pytest.raises(ValueError, match="one entry per sample, or 2 parts"):
        blocker(torch.randn(2, 5), boxes_of(2, 2), torch.randn(2))


SEVENS = torch.tensor([7, 8])


@pytest.mark.parametrize(
    ("other", "first", "second"),
    [
        (SEVENS, [7], [8]),
        (SEVENS.float(), [7], [8]),
        (SEVENS.numpy(), [7], [8]),
        ({"y": SEVENS}, [7], [8]),
        (Target(SEVENS, SEVENS), [7, 7], [8, 8]),
        (["a", "b"], ["a"], ["b"]),
        (0.5, [0.5], [0.5]),
    ],
    ids=lambda v: type(v).__name__,
)
def test_parts_of_different_kinds_are_parts_from_the_first_batch_on(other: Any, first: Any, second: Any) -> None:
    """What a data loader makes of samples that hold tuples: images and labels are no samples of one kind."""
    blocker, x = blocked(), torch.randn(2, 4)
    _, cut = blocker(torch.randn(2, 5), [x, other])
    assert blocker.last is not None
    assert torch.equal(cut[0], x[blocker.last.indices])
    assert list(leaves(cut[1])) == (second if blocker.last.indices.item() else first)


def test_a_list_of_mappings_beside_it_tells_how_a_list_of_tensors_is_read() -> None:
    blocker = blocked()
    boxes, meta = boxes_of(2, 2), [{"file": "a"}, {"file": "b"}]
    _, cut, names = blocker(torch.randn(2, 5), boxes, meta)
    assert blocker.last is not None
    assert_cut(cut, boxes, blocker.last.indices)
    assert_cut(names, meta, blocker.last.indices)


# ------------------------------------------------------------------------------------------- dataclasses as a batch


@dataclasses.dataclass
class WithLength:
    image: Tensor
    length: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.length = len(self.image)


@dataclasses.dataclass
class WithMask:
    image: Tensor
    mask: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.mask = torch.rand(len(self.image))


@dataclasses.dataclass
class SetLater:
    image: Tensor
    mask: Tensor = dataclasses.field(init=False)
    epoch: int = dataclasses.field(init=False, default=0)
    nothing: Tensor = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: Tensor
    mask: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", torch.rand(len(self.image)))


@dataclasses.dataclass
class WithInitVar:
    image: Tensor
    scale: dataclasses.InitVar[float]
    mask: Tensor = dataclasses.field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.mask = scale * torch.rand(len(self.image))


@dataclasses.dataclass(slots=True)
class Slotted:
    image: Tensor
    mask: Tensor = dataclasses.field(init=False)


@dataclasses.dataclass(init=False)
class OwnInit:
    image: Tensor
    mask: Tensor

    def __init__(self, both: tuple[Tensor, Tensor]) -> None:
        self.image, self.mask = both


def set_later(kind: Any, size: int) -> Any:
    batch = kind(torch.randn(size, 4))
    batch.mask = torch.rand(size)
    return batch


@pytest.mark.parametrize(
    "make",
    [
        WithMask,
        Frozen,
        lambda x: WithInitVar(x, 3.0),
        lambda x: set_later(SetLater, len(x)),
        lambda x: set_later(Slotted, len(x)),
        lambda x: OwnInit((x, torch.rand(len(x)))),
    ],
    ids=["post init", "frozen", "InitVar", "set later", "slots", "own init"],
)
def test_fields_that_init_does_not_take_are_cut_too(make: Any) -> None:
    blocker = blocked()
    batch = make(torch.randn(6, 4))
    mask = batch.mask.clone()
    _, cut = blocker(torch.randn(6, 5), batch)
    assert blocker.last is not None
    assert type(cut) is type(batch)
    assert torch.equal(cut.image, batch.image[blocker.last.indices])
    assert torch.equal(cut.mask, mask[blocker.last.indices])
    assert torch.equal(batch.mask, mask)


def test_what_post_init_works_out_fits_the_retained_samples() -> None:
    _, cut = blocked()(torch.randn(6, 5), WithLength(torch.randn(6, 4)))
    assert cut.length == len(cut.image) == 3


def test_plain_values_that_were_set_later_are_kept() -> None:
    batch = set_later(SetLater, 6)
    batch.epoch = 5
    _, cut = blocked()(torch.randn(6, 5), batch)
    assert cut.epoch == 5
    assert not hasattr(cut, "nothing")
