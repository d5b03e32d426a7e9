"""Cutting batches: everything with the batch's length alike, everything else handed through or refused."""

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from halfway import ForwardBlocker, WithIds
from halfway.batches import rows
from halfway.batches.batch import Batch, length

N = 6
ROWS = torch.tensor([0, 3, 4])


def cut(part, size=N, indices=ROWS):
    whole = Batch((part,), {})
    whole.validate(size)
    return whole.cut(indices, size).value()


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Sample:
    image: Any
    label: Any
    name: str = "train"


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: Any


# ------------------------------------------------------------------------------------------------ structures


def test_tensors_of_any_type_are_cut_along_the_first_axis():
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        t = torch.arange(N * 4).reshape(N, 2, 2).to(dtype)
        assert torch.equal(cut(t), t[ROWS])
        assert cut(t).dtype == dtype


def test_the_cut_is_a_copy():
    t = torch.zeros(N, 2)
    cut(t).fill_(1)
    assert t.sum() == 0


def test_gradients_flow_through_the_cut():
    t = torch.randn(N, 2, requires_grad=True)
    cut(t).sum().backward()
    assert t.grad.sum(1).tolist() == [2.0, 0, 0, 2, 2, 0]


@pytest.mark.parametrize("kind", [tuple, list])
def test_sequences_of_tensors_keep_their_type(kind):
    a, b = torch.arange(N), torch.randn(N, 2)
    out = cut(kind([a, b]))
    assert type(out) is kind
    assert torch.equal(out[0], ROWS)
    assert torch.equal(out[1], b[ROWS])


@pytest.mark.parametrize(
    "kind", [dict, collections.OrderedDict, lambda d: collections.defaultdict(list, d), collections.UserDict]
)
def test_mappings_keep_their_type_and_order(kind):
    tree = kind({"b": torch.arange(N), "a": 3})
    out = cut(tree)
    assert type(out) is type(tree)
    assert list(out) == ["b", "a"]
    assert torch.equal(out["b"], ROWS)
    assert out["a"] == 3


def test_named_tuples_and_dataclasses_are_rebuilt():
    point = cut(Point(torch.arange(N), {"z": torch.arange(N)}))
    assert type(point) is Point
    assert torch.equal(point.x, ROWS)
    assert torch.equal(point.y["z"], ROWS)
    sample = cut(Sample(torch.arange(N), [f"{i}" for i in range(N)]))
    assert type(sample) is Sample
    assert torch.equal(sample.image, ROWS)
    assert sample.label == ["0", "3", "4"]
    assert sample.name == "train"
    assert torch.equal(cut(Frozen(torch.arange(N))).image, ROWS)


def test_numpy_arrays_are_cut():
    array = np.arange(N * 2).reshape(N, 2)
    out = cut({"a": array})["a"]
    assert isinstance(out, np.ndarray)
    assert out.tolist() == array[[0, 3, 4]].tolist()


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("entries", [[f"file{i}" for i in range(N)], list(range(N)), [None, 1, "a", 2.0, b"b", True]])
def test_a_sequence_with_one_plain_entry_per_sample_is_cut(kind, entries):
    out = cut(kind(entries))
    assert type(out) is kind
    assert list(out) == [entries[i] for i in (0, 3, 4)]


@pytest.mark.parametrize("scalar", [np.int64, np.float32, np.bool_, torch.tensor, np.array])
def test_a_list_of_scalars_is_cut_or_refused_but_never_handed_through(scalar):
    labels = [scalar(i) for i in range(N)]
    out = cut(labels)
    assert all(a is labels[i] for a, i in zip(out, (0, 3, 4), strict=True))
    with pytest.raises(ValueError, match=r"batch\[0\] has 5 entries"):
        cut(labels[:5])


def test_lists_with_one_tensor_per_sample_are_cut():
    images = [torch.randn(3, 4 + i, 5) for i in range(N)]
    out = cut(images)
    assert [t is images[i] for t, i in zip(out, (0, 3, 4), strict=True)] == [True] * 3


def test_lists_with_one_structure_per_sample_are_cut():
    targets = [{"boxes": torch.randn(i, 4), "labels": torch.arange(i)} for i in range(1, N + 1)]
    out = cut(targets)
    assert [len(t["boxes"]) for t in out] == [1, 4, 5]
    assert all(t is targets[i] for t, i in zip(out, (0, 3, 4), strict=True))


def test_nested_per_sample_lists_are_cut_by_sample():
    words = [["a"] * (i + 1) for i in range(N)]
    assert cut(words) == [words[0], words[3], words[4]]


@pytest.mark.parametrize("kind", [list, tuple])
def test_as_many_parts_as_samples_are_still_parts(kind):
    """N tensors that each hold all N samples: each is cut, none is dropped."""
    parts = kind(torch.arange(N) + 10 * i for i in range(N))
    out = cut(parts)
    assert len(out) == N
    for i, part in enumerate(out):
        assert torch.equal(part, ROWS + 10 * i)


def test_a_batch_of_two_samples_in_two_parts_is_cut_by_sample():
    x, y = torch.randn(2, 5), torch.tensor([7, 8])
    for part in ((x, y), [x, y], {"p": (x, y)}, Point(x, y)):
        out = cut(part, size=2, indices=torch.tensor([1]))
        first, second = out["p"] if isinstance(out, dict) else out
        assert torch.equal(first, x[1:])
        assert second.tolist() == [8]


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        2.5,
        True,
        1j,
        "name",
        b"bytes",
        torch.tensor(3.0),
        np.array(2.0),
        np.float64(1),
        np.int64(4),
        np.float32(1),
        np.bool_(True),
        [],
        (),
        {},
    ],
    ids=lambda v: type(v).__name__ if not isinstance(v, (str, type)) else None,
)
def test_what_is_plainly_not_per_sample_is_handed_through(value):
    out = cut({"x": torch.arange(N), "v": value})["v"]
    assert type(out) is type(value)
    assert out is value or out == value


def test_a_string_of_the_batchs_length_is_not_cut():
    assert cut("abcdef") == "abcdef"


# --------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("part", "kind", "words"),
    [
        (torch.zeros(5), ValueError, r"batch\[0\] has 5 entries along its first axis.*6 samples"),
        ({"a": (torch.zeros(N), torch.zeros(1, N))}, ValueError, r"batch\[0\]\['a'\]\[1\] has 1 entries"),
        (Sample(torch.zeros(N), torch.zeros(2)), ValueError, r"batch\[0\]\.label has 2 entries"),
        (Point(torch.zeros(N), torch.zeros(2)), ValueError, r"batch\[0\]\[1\] has 2 entries"),
        (np.zeros(5), ValueError, r"batch\[0\] has 5 entries"),
        (["a", "b"], ValueError, r"batch\[0\] has 2 entries"),
        ([torch.zeros(N), torch.zeros(3)], ValueError, r"batch\[0\]\[1\] has 3 entries"),
        ([torch.zeros(3, 4) for _ in range(N - 1)], ValueError, r"batch\[0\]\[0\] has 3 entries"),
        ({1, 2}, TypeError, r"batch\[0\] is a set"),
        ({"x": object()}, TypeError, r"batch\[0\]\['x'\] is a object"),
        (Sample, TypeError, r"batch\[0\] is a type"),
        (torch.eye(N).to_sparse(), TypeError, r"batch\[0\] is not a dense tensor"),
    ],
    ids=lambda v: type(v).__name__ if not isinstance(v, (str, type)) else None,
)
def test_errors_say_where_in_the_batch(part, kind, words):
    with pytest.raises(kind, match=words):
        Batch((part,), {}).validate(N)
    with pytest.raises(kind, match=words.replace(r"batch\[0\]", "target")):
        Batch((), {"target": part}).validate(N)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout):
    nested = torch.nested.nested_tensor([torch.ones(i + 1) for i in range(N)], layout=layout)
    with pytest.raises(TypeError, match=r"batch\[0\] is not a dense tensor"):
        Batch((nested,), {}).validate(N)


def test_the_length_is_that_of_the_first_tensor_with_an_axis():
    assert length(("a", 3, {"k": [torch.tensor(1.0), torch.zeros(4, 2)]}, torch.zeros(7))) == 4
    with pytest.raises(ValueError, match="empty"):
        length(torch.zeros(0, 3))
    with pytest.raises(ValueError, match="no tensor"):
        length(("a", torch.tensor(1.0)))


def test_what_is_handed_back_has_the_form_of_what_was_passed():
    x = torch.zeros(N)
    assert Batch((x,), {}).value() is x
    assert Batch((x, x), {}).value() == (x, x)
    named = {"x": x}
    assert Batch((), named).value() == named


# ------------------------------------------------------------------------------------------- memory layout


@pytest.mark.parametrize("count", [1, 3, N])
def test_channels_last_stays_channels_last(count):
    image = torch.randn(N, 3, 4, 5).to(memory_format=torch.channels_last)
    indices = torch.arange(count)
    for out in (rows.take(image, indices), cut(image, indices=indices)):
        assert torch.equal(out, image[indices])
        assert out.is_contiguous(memory_format=torch.channels_last)
    video = torch.randn(N, 3, 2, 4, 5).to(memory_format=torch.channels_last_3d)
    out = cut(video, indices=indices)
    assert torch.equal(out, video[indices])
    assert out.is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_take_is_index_select_for_any_layout_and_axis(dim):
    base = torch.randn(4, 5, 6)
    indices = torch.tensor([0, 2])
    layouts = [
        base,
        base.permute(2, 0, 1),
        base.transpose(0, 1),
        base[:, :, ::2],
        base[:1].expand(4, 5, 6),
        base[1:, 1:],
    ]
    for t in layouts:
        assert torch.equal(rows.take(t, indices, dim), t.index_select(dim, indices))
    for t in layouts[:3]:
        out = rows.take(t, indices, dim)
        order = sorted(range(3), key=lambda d: -t.stride(d))
        assert sorted(range(3), key=lambda d: -out.stride(d)) == order
        assert out.permute(order).is_contiguous()


# ------------------------------------------------------------------------------------------ through the blocker


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.stem(x))


def test_the_blocker_cuts_everything_alike():
    model = Net()
    blocker = ForwardBlocker(model, "stem", 0.5)
    number = torch.arange(8)
    x = torch.randn(8, 4)
    x_, rest, names, weight = blocker(x, {"y": number, "p": Point(number, np.arange(8))}, list("abcdefgh"), 0.5)
    kept = blocker.last.indices
    assert len(kept) == 4
    assert torch.equal(x_, x[kept])
    assert torch.equal(rest["y"], kept)
    assert torch.equal(rest["p"].x, kept)
    assert rest["p"].y.tolist() == kept.tolist()
    assert names == ["abcdefgh"[i] for i in kept]
    assert weight == 0.5
    model(x_)
    assert blocker.stats.steps_replayed == 1


def test_the_blocker_keeps_channels_last():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2)).to(memory_format=torch.channels_last)
    blocker = ForwardBlocker(model, "0", 0.5)
    x = blocker(torch.randn(6, 3, 8, 8).to(memory_format=torch.channels_last))
    assert x.is_contiguous(memory_format=torch.channels_last)
    model(x)
    assert blocker.stats.steps_replayed == 1


def test_a_batch_encoding_of_transformers_stays_one():
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": torch.arange(N), "attention_mask": torch.ones(N, 3)})
    out = cut(encoding)
    assert type(out) is type(encoding)
    assert torch.equal(out["input_ids"], ROWS)
    assert out["attention_mask"].shape == (3, 3)


# -------------------------------------------------------------------------------------------------------- ids


class Items(Dataset):
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return self.make(index)


def test_ids_are_one_more_entry_of_a_tuple():
    data = WithIds(TensorDataset(torch.arange(10) * 2.0, torch.arange(10) * 3))
    assert len(data) == 10
    assert data[4] == (8.0, 12, 4)


def test_ids_are_an_entry_of_a_mapping():
    item = {"x": 1.0}
    assert WithIds(Items(lambda i: item))[7] == {"x": 1.0, "ids": 7}
    assert item == {"x": 1.0}
    with pytest.raises(ValueError, match="already yields an entry 'ids'"):
        WithIds(Items(lambda i: {"ids": i}))[0]


def test_anything_else_becomes_a_pair_with_its_id():
    assert WithIds(Items(lambda i: float(i)))[3] == (3.0, 3)
    assert WithIds(Items(lambda i: [i, i]))[3] == ([3, 3], 3)
    assert WithIds(Items(lambda i: Point(i, i)))[3] == (Point(3, 3), 3)


def test_an_iterable_data_set_has_no_ids():
    class Stream(IterableDataset):
        def __iter__(self):
            yield 1

    with pytest.raises(TypeError, match="map-style"):
        WithIds(Stream())


def test_ids_through_a_shuffling_loader_and_the_blocker_name_the_samples():
    x, y = torch.randn(20, 4), torch.arange(20)
    model = Net()
    blocker = ForwardBlocker(model, "stem", 0.5)
    seen = []
    for x_, y_, ids in DataLoader(WithIds(TensorDataset(x, y)), batch_size=10, shuffle=True):
        assert ids.dtype == torch.int64
        assert torch.equal(ids, y_)
        kept_x, kept_y = blocker(x_, y_, ids=ids)
        assert torch.equal(kept_x, x[kept_y])
        assert torch.equal(kept_y, ids[blocker.last.indices])
        model(kept_x)
        seen += ids.tolist()
    assert sorted(seen) == list(range(20))


def test_ids_of_mappings_through_a_loader():
    loader = DataLoader(WithIds(Items(lambda i: {"x": torch.full((4,), float(i))})), batch_size=5)
    batch = next(iter(loader))
    assert torch.equal(batch["ids"], torch.arange(5))
    assert torch.equal(batch["x"][:, 0], torch.arange(5.0))
